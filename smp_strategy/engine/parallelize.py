"""Parallelization: an ordinary module becomes the local model of each rank, in the first step and for all later runs.

[Note: order of parallelization] A trace needs a batch, so nothing is decided before there is one. Then:

1. tensors without values are checked: all must be able to get some;
2. layers are split, because the partition must know the sizes of their parts;
3. the partition is decided (:mod:`smp_strategy.engine.decide`);
4. every rank frees the values of other ranks (:mod:`smp_strategy.engine.local_model`);
5. calls of units go to the runtime of this rank's stage.

From then on a rank has a smaller model. With tensor parallelism there is one such model per part, each with its own
pipeline and all with the same partition; they meet in split layers only.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.activations.offload import Offload
from smp_strategy.activations.selection import choose
from smp_strategy.activations.unit_wrapper import UnitWrapper
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.host_copies import HostCopies
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.distributed.rng_sync import BatchSource
from smp_strategy.engine.carried_state import Rehearsals
from smp_strategy.engine.decide import decide
from smp_strategy.engine.delayed_init import DelayedModule
from smp_strategy.engine.dry_run import DryRunInput, look_for_exposed, rescaled_tables, run_for_real
from smp_strategy.engine.given_partition import GivenPartition, num_parameters_of
from smp_strategy.engine.local_model import LocalModel
from smp_strategy.engine.plan_cache import PlanCache
from smp_strategy.engine.startup_report import render_batch, render_layout, render_order
from smp_strategy.engine.unit_calls import UnitCalls
from smp_strategy.errors import SMPError, UnsupportedError
from smp_strategy.model.ownership import Ownership
from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.units import Unit
from smp_strategy.pipeline.job import Step
from smp_strategy.pipeline.microbatch import split
from smp_strategy.pipeline.microbatch_state import MicrobatchState, reached_by_hooks
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.transport import Transport
from smp_strategy.pipeline.user_collectives import replicas_of
from smp_strategy.planning.costs import Costs
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.joint_batch import join
from smp_strategy.tensor_parallel.plan.observed_pairs import read_by_others
from smp_strategy.tensor_parallel.plan.patterns import heads_explained
from smp_strategy.tensor_parallel.plan.split_report import SplitReport
from smp_strategy.tensor_parallel.split import split_layers
from smp_strategy.tensor_parallel.split_module import SplitLayerSet

__all__ = ["FirstStep", "Parallelizer"]


class FirstStep(NamedTuple):
    """Step of a new kind, with its batch."""

    kind: str
    """Kind of step; steps of the same kind probably take the same path."""
    step: Step
    """The user's code for one microbatch."""
    microbatches: Sequence[Any]
    """Microbatches of its batch."""
    loss_of: Callable[[Any], Tensor | None] | None = None
    """Picks the loss out of the result of ``step``."""


@final
class Parallelizer:
    """Decides how a module is parallelized, and builds this rank's local model and runtime accordingly.

    Args:
        config: All options.
        module: Module, full on every rank until :meth:`take_share`.
        units: Its units.
        mesh: Process mesh.
        calls: Interception of unit calls.
        delayed: Tensors of the module without values yet.
        given: Decisions of the user.
        report: Called with text for the user, the same on every rank.

    Attributes:
        partition: Stage of each unit; ``None`` until it is decided.
        treatments: Activation policies of units.
        costs: Costs of calls: modelled, or measured once the partition is decided.
    """

    def __init__(
        self,
        config: SMPConfig,
        module: nn.Module,
        units: Sequence[Unit],
        mesh: ProcessMesh,
        *,
        calls: UnitCalls,
        delayed: DelayedModule,
        given: GivenPartition | None,
        report: Callable[[str], None],
    ) -> None:
        self._config = config
        self._module = module
        self._units = units
        self._mesh = mesh
        self._calls = calls
        self._delayed = delayed
        self._given = given
        self._report = report
        self._num_parameters = num_parameters_of(units)
        self._recomputed = choose(config, module, units)
        self.treatments = self._recomputed.units
        self._shape_inference = ShapeInference(delayed.device)
        self._group = None if mesh.tp_group is None else TensorGroup(mesh.tp_group)
        self._split: SplitLayerSet | None = None
        self._used_by_glue: tuple[Tensor, ...] = ()
        self._plans: PlanCache | None = None
        self._has_counted = False
        self.partition: Partition | None = None
        self.costs = Costs.modelled(delayed.device)

    @property
    def plans(self) -> PlanCache:
        """Plan cache; exists once the partition is decided."""
        assert self._plans is not None
        return self._plans

    def close(self) -> None:
        """Release process groups; decisions can still be read."""
        if self._group is not None:
            self._group.close()

    def begin(self, what: str) -> None:
        """Begin a step: see :meth:`TensorGroup.begin`."""
        if self._group is not None:
            self._group.begin(what)

    def in_hook(self) -> AbstractContextManager[None]:
        """Context of the user's code in a hook: see :meth:`TensorGroup.in_hook`."""
        return nullcontext() if self._group is None else self._group.in_hook()

    def cut(self, batch: Any, known: BatchSource | None, *, is_joint: bool) -> tuple[list[Any], tuple[int, ...]]:
        """Microbatches and their sizes, from the samples of all ranks of the tensor-parallel group. Collective.

        Args:
            batch: Batch that this rank has read.
            known: Facts that the data loader knows about its samples.
            is_joint: Whether all these ranks have read this batch; else see :func:`join`.
        """
        if not (is_joint or self._config.prescaled_batch or self._group is None):
            batch, known = join(batch, self._group, known)
        return split(batch, self._config.num_microbatches(self._mesh.pp), known)

    def warn_of_fewer(self, num_run: int) -> None:
        """Warn that a batch has fewer samples than microbatches are asked for; ``num_run`` microbatches are run."""
        wanted = self._config.microbatches
        if wanted is not None and num_run < wanted:
            warnings.warn(
                f"`microbatches` is {wanted}, but the batch has too few samples for that: {num_run} will be run. Use "
                f"batches of at least {wanted} samples, or set `microbatches={num_run}`.",
                stacklevel=2,
            )

    def report_batch(self, num_samples: int) -> None:
        """Report once the number of samples in a training step, given those of this replica's batch."""
        if not self._has_counted and self._mesh.shape.world_size > 1:
            self._has_counted = True
            self._report(render_batch(num_samples, self._mesh.shape))

    def dry_run_input(self, optimizers: Sequence[Optimizer]) -> DryRunInput:
        """Module and environment of dry runs."""
        return DryRunInput(
            module=self._module,
            units=self._units,
            calls=self._calls,
            shape_inference=self._shape_inference,
            device=self._delayed.device,
            optimizers=optimizers,
            num_microbatches=self._config.num_microbatches(self._mesh.pp) if self._mesh.pp > 1 else 1,
            replicas=replicas_of(self._mesh),
        )

    def decide(self, first: FirstStep, optimizers: Sequence[Optimizer]) -> None:
        """Split layers and decide the partition, unless there is one already. Collective over all ranks.

        See [Note: order of parallelization].
        """
        self._delayed.prepare(self._units, optimizers)
        if self._group is not None:
            self._split_layers(first, optimizers, self._group)
        if self.partition is not None:
            return
        # Plan and report the microbatches that will run: a batch may have too few samples for the option.
        config, num_run = self._config, len(first.microbatches)
        if first.kind in ("train", "manual") and num_run < config.num_microbatches(self._mesh.pp):
            config = replace(config, microbatches=num_run)
        with heads_explained(self._config.tensor_parallel or {}):
            self.partition, found, self.costs = decide(
                config,
                self.dry_run_input(optimizers),
                self._mesh.shape,
                first=(first.step, first.microbatches[0], first.loss_of),
                given=self._given,
                chosen=self._recomputed.units,
                num_parameters=self._num_parameters,
                measuring=nullcontext if self._group is None else self._group.alone,
            )
        self._refuse_rewritten()
        self.treatments = self.partition.treatments
        self._used_by_glue = found.used_by_glue
        self._plans = PlanCache(self._config, self.partition, self.costs, self._report, self._agree_on_trace)
        if found.trace is not None and found.trace.loss is not None:
            self._plans.learn(first.kind, found.trace)
        layout = render_layout(self._mesh.shape, self.partition, config, self.split_report)
        notes = self.costs.render()
        self._report(f"{notes}\n{layout}" if notes else layout)

    @property
    def split_report(self) -> SplitReport | None:
        """Report on each layer; ``None`` if none are split, or before the first step."""
        return None if self._split is None else self._split.report

    def _split_layers(self, first: FirstStep, optimizers: Sequence[Optimizer], group: TensorGroup) -> None:
        def run_step() -> None:
            self._calls.intercept(self._units)
            try:
                with self._delayed.pretending():
                    run_for_real(first.step, first.microbatches[0], first.loss_of, self.dry_run_input(optimizers))
            finally:
                self._calls.give_back()

        before = None if self._split is None else dict(self._split.cuts)
        watched = None if self._split is None else self._split.watched
        # Interception keeps the `forward` of units as it was then; splitting changes it, so intercept again afterwards.
        self._calls.give_back()
        try:
            split = split_layers(
                self._module,
                group,
                patterns=self._config.tensor_parallel,
                strict=self._config.tensor_parallel_strict,
                stream_dim=self._config.stream_dim,
                run_step=run_step,
                before=watched,
            )
            self._split = SplitLayerSet(split, group)
        finally:
            self._calls.intercept(self._units)
        self._delayed.divide(self._split)
        if before is not None and before != self._split.cuts:
            odd = {id(parameter) for parameter, _ in before.items() ^ self._split.cuts.items()}
            names = [name for name, parameter in self._module.named_parameters() if id(parameter) in odd]
            where = f"`{names[0]}` ({self._split.report.why(names[0])})" if names else "Layers"
            raise SMPError(
                f"{where} would be split otherwise than in the last run of this strategy, which optimizers have state "
                "for: modules, patterns, hooks or who reads weights have changed. Use a new strategy object."
            )

    @property
    def needs_look(self) -> bool:
        """Whether each new kind of step needs :meth:`look` before it runs."""
        return self._split is not None

    def look(self, kind: FirstStep, optimizers: Sequence[Optimizer]) -> None:
        """Dry run of a later kind of step, which may use tensors that the first one has not used.

        Raises:
            UnsupportedError: code above the units, or a hook registered since, computes with parts of split layers as
                if they were full; or units write to sharded weights.
        """
        self._refuse_new_hooks()
        has_values = self._mesh.pp == 1 and self._mesh.shard_group is None
        inputs = self.dry_run_input(optimizers)

        def run_step() -> tuple[Tensor, ...]:
            return look_for_exposed(kind.step, kind.microbatches[0], inputs, has_values=has_values).used_by_glue

        cuts = {} if self._split is None else self._split.cuts
        used_parts = {id(tensor) for tensor in run_step() if tensor in cuts}
        if used_parts and has_values:
            # A layer may read its own part: only the uses by other code are errors.
            used_parts &= read_by_others(dict(self._module.named_modules()), run_step)
        self._refuse_rewritten()
        found = [name for name, parameter in self._module.named_parameters() if id(parameter) in used_parts]
        if found:
            layer = found[0].rpartition(".")[0]
            raise UnsupportedError(
                f"Code above the units computes with `{found[0]}`{f' and {len(found) - 1} more' * (len(found) > 1)}, "
                "of which `tensor_parallel_degree` gives each rank a part. Keep the layer whole "
                f'(`tensor_parallel={{"{layer}": "replicate"}}`), or move the computation into a module.'
            )

    def rehearse(self, kind: FirstStep, optimizers: Sequence[Optimizer], keep_shared: Iterable[nn.Module]) -> None:
        """Find out how far microbatches of a new kind of step may take turns. Collective over the replica's ranks.

        Args:
            kind: Step of the new kind.
            optimizers: Optimizers of the module.
            keep_shared: Modules whose attributes accumulate over microbatches.
        """
        assert self.partition is not None
        inputs = self.dry_run_input(optimizers)
        # In manual steps microbatches run one after the other from barrier to barrier anyway.
        if self._config.skip_tracing or inputs.num_microbatches == 1 or kind.kind == "manual":
            return
        glue, units = self._glue_and_units(keep_shared)
        rule = Rehearsals(
            step=kind.step,
            microbatch=kind.microbatches[0],
            inputs=inputs,
            stage_of=self.partition.stage_of,
            num_stages=self._mesh.pp,
            private_state=lambda: self._private_state(glue, units),
        ).turn_rule()
        rules = collectives.gather_objects(rule, "how far microbatches may take turns", self._mesh.replica_group)
        found = [each for each in rules if each is not None]
        if not found:
            return
        # Stages under different rules would deadlock. Without a gate, microbatches run one after the other.
        rule = found[0] if len(set(rules)) == 1 else found[0]._replace(gate=None)
        self.plans.turn_rules[kind.kind] = rule
        if rule.gate is None:
            self._report(render_order(kind.kind, rule.names))

    def refuse_rescaled(self) -> None:
        """Before training: refuse embeddings with ``max_norm`` if there are several replicas.

        Raises:
            UnsupportedError: replicas would rescale rows of an embedding each in its own way.
        """
        tables = {id(table) for table in rescaled_tables(self._units)} if self._mesh.dp > 1 else set[int]()
        names = [name for name, parameter in self._module.named_parameters() if id(parameter) in tables]
        if names:
            raise UnsupportedError(
                f"`{names[0]}` is rescaled as it is used (`max_norm`), but {self._mesh.dp} replicas use rows of their "
                "own, so that they would not have the same weights any more. Leave `max_norm` out and rescale all rows "
                "after the optimizer's step (`torch.renorm` in `on_train_batch_end`), or train with one replica."
            )

    def _refuse_rewritten(self) -> None:
        """After a dry run: refuse units that write to sharded weights.

        Raises:
            UnsupportedError: a unit writes to a weight that is gathered for each use, of which a rank keeps only its
                shard of the earlier values.
        """
        rewritten = sorted(self._shape_inference.rewritten)
        if rewritten and self._mesh.shard_group is not None:
            raise UnsupportedError(
                f"`{rewritten[0]}`{f' and {len(rewritten) - 1} more' * (len(rewritten) > 1)} is written to by its own "
                "layer as it computes, or by a hook on that, but its values are put together from shards for each use, "
                "and what is written would be lost. Change it after the optimizer's step (in `on_train_batch_end`), "
                "compute with a changed copy (`torch.nn.utils.parametrizations`), or train without "
                "`sharded_data_parallel_degree`."
            )

    def _refuse_new_hooks(self) -> None:
        if self._split is None:
            return
        problem = self._split.hook_problem(dict(self._module.named_modules(remove_duplicate=False)))
        if problem is not None:
            raise UnsupportedError(
                f"`tensor_parallel_degree`: {problem}. Register it before the first step (in `__init__` or "
                "`configure_model`; validation may come before training), which keeps the layer whole, or keep it so "
                'yourself: `tensor_parallel={"<layer>": "replicate"}`.'
            )

    def _agree(self, is_so: bool) -> bool:
        """Whether something is true on all ranks of the tensor-parallel group. Collective over it."""
        if self._group is None:
            return is_so
        return not self._group.most(torch.tensor([not is_so], dtype=torch.uint8, device="cpu")).item()

    def _agree_on_trace(self, trace: Trace) -> Trace:
        """``trace`` of the first rank of the tensor-parallel group. Collective over it."""
        if self._group is None:
            return trace
        first = self._group.objects(trace)[0]
        return Trace(first.events, first.loss)

    def take_share(self, copies: Iterable[nn.Module], *, everyone_sees: bool) -> LocalModel:
        """Free the values of other ranks; see :class:`~smp_strategy.engine.local_model.LocalModel`."""
        assert self.partition is not None
        # Not kept from an earlier run: buffers may have been replaced since.
        ownership = Ownership(
            self._module, self._units, self.partition.stage_of, self._mesh.pp, used_by_glue=self._used_by_glue
        )
        return LocalModel(
            self._module,
            ownership,
            self._mesh,
            self._config,
            self._delayed,
            copies=copies,
            everyone_sees=everyone_sees,
            split=self._split,
        )

    def transport(self, timeout: timedelta | None) -> Transport | None:
        """Point-to-point transport between the stages; ``None`` if there is a single one."""
        return Transport(self._mesh.stage_ranks, self._mesh.pp_group, timeout) if self._mesh.pp > 1 else None

    def runtime(
        self, local_model: LocalModel, transport: Transport | None, keep_shared: Iterable[nn.Module]
    ) -> Runtime:
        """Runtime that executes the user's code on this rank's stage.

        Args:
            local_model: Local model.
            transport: See :meth:`transport`.
            keep_shared: Modules whose attributes accumulate over microbatches.
        """
        assert self.partition is not None
        glue, units = self._glue_and_units(keep_shared)
        activations = self._activations(glue)
        stage = Stage(
            number=self._mesh.stage,
            stage_of=self.partition.stage_of,
            num_stages=self._mesh.pp,
            shape_inference=self._shape_inference,
            transport=transport,
            device=self._delayed.device,
            with_weights=local_model.with_weights,
            activations=activations,
            reads_refused=local_model.reads_refused,
            replicas=replicas_of(self._mesh),
            agree=self._agree,
        )
        if self._config.compile:
            for name in (name for name, owner in stage.stage_of.items() if owner == stage.number):
                self._calls.compile(name)
        return Runtime(stage, self._private_state(glue, units))

    def _private_state(self, glue: Sequence[nn.Module], units: Sequence[nn.Module]) -> MicrobatchState:
        return MicrobatchState(glue, units, lambda: self._calls.exposed_parts, self._calls.switches)

    def _activations(self, glue: Sequence[nn.Module]) -> UnitWrapper:
        """Wrapper that applies the activation policies of units and of their submodules."""

        def reached(unit: nn.Module) -> tuple[Sequence[nn.Module], Sequence[Any]]:
            return glue, reached_by_hooks(list(unit.modules()))

        activations = UnitWrapper(self.treatments, self._delayed.device, reached, offload=self._offload())
        inside = self._recomputed.inside.items()
        parts = {name: (self._module.get_submodule(name), treatment) for name, treatment in inside}
        self._calls.recompute_inside(parts, activations, self._delayed.device)
        return activations

    def _offload(self) -> Offload:
        copies = HostCopies(self._delayed.device)
        if not any(treatment.offload for treatment in self.treatments.values()):
            return Offload(copies)
        return Offload(
            copies,
            horizon=self._config.activation_loading_horizon,
            min_bytes=self._config.least_offloaded,
            weights=lambda: itertools.chain(self._module.parameters(), self._module.buffers()),
        )

    def _glue_and_units(self, keep_shared: Iterable[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
        units = [unit.module for unit in self._units]
        inside = {id(part) for unit in units for part in unit.modules()} | set(map(id, keep_shared))
        return [module for module in self._module.modules() if id(module) not in inside], units
