"""Local model: the parameters that this rank holds, and how they are trained, shown to hooks, saved and restored.

Which parameters these are, and which part of each, :class:`~smp_strategy.data_parallel.holdings.Holdings` tells. The
first step creates the local model by freeing the values of other ranks; it lives until the module is full again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.checkpoint import full_state_dict as full
from smp_strategy.checkpoint.load import MODULE, load_module
from smp_strategy.checkpoint.restore_module import restore
from smp_strategy.checkpoint.sources import WholeState
from smp_strategy.config.config import RestoreModule, SMPConfig
from smp_strategy.data_parallel.bucketed_all_reduce import BucketedAllReduce
from smp_strategy.data_parallel.grad_norm import UnscaleResult, agreed, unscale_gradients
from smp_strategy.data_parallel.gradient_sums import replica_sums
from smp_strategy.data_parallel.optimizer_checks import problems_of_cuts
from smp_strategy.data_parallel.optimizer_dependence import problems_of_dependence
from smp_strategy.data_parallel.optimizer_state import FullOptimizerState, mark_own_states
from smp_strategy.data_parallel.reduction import Reduction
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.agreement.common_settings import of_optimizer, plain
from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.topics import UPDATE
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.distributed.rendezvous import meet
from smp_strategy.engine.delayed_init import DelayedModule
from smp_strategy.engine.hooks.full_parameters import FullParameters
from smp_strategy.engine.hooks.views import Views
from smp_strategy.engine.own_parameters import OwnParameters
from smp_strategy.engine.run_outcome import BrokenUpdates
from smp_strategy.engine.step_results import Accumulated, accumulating
from smp_strategy.engine.take_holdings import take_holdings
from smp_strategy.errors import ConfigError
from smp_strategy.model.ownership import Ownership
from smp_strategy.pipeline.shared_tensors.weight_operations import UnitTensor, has_teacher
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.precision.dtypes import compute_dtype, is_half, reduce_dtype
from smp_strategy.precision.master_weights import Fp32Gradients
from smp_strategy.tensor_parallel.split_module import SplitModule

__all__ = ["LocalModel"]

_UPDATES = "the settings of optimizers"


class OngoingBackward(NamedTuple):
    """Pass with backward that has not ended yet."""

    gradients: Accumulated
    """Gradients that the pass adds; complete when it has ended."""
    averages: BucketedAllReduce | None
    """All-reduces of these gradients over the replicas that begin during the pass; ``None``: none do."""
    around_last: Callable[[], AbstractContextManager[None]]
    """Makes a context for the last backward action of the pass."""


@final
class LocalModel:
    """Parameters, gradients and optimizer state of this rank. The constructor frees all other values; collective.

    Args:
        delayed: Tensors without values yet, and the device where they are made.
        copies: Module copies of callbacks (EMA weights), which are partitioned together with the module.

    Attributes:
        holdings: Where each parameter is, and which part of it this rank has.
        reduction: Gradient reduction over stages and replicas.
        whole_on: Ranks that have the full module: all, rank 0, or none.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        mesh: ProcessMesh,
        config: SMPConfig,
        delayed: DelayedModule,
        ledger: Ledger,
        *,
        split: SplitModule,
        copies: Sequence[nn.Module] = (),
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._config = config
        self._delayed = delayed
        self._split = split
        self.holdings = take_holdings(module, ownership, mesh, config, delayed, split.parts, copies)
        self._sharded, self._state = self.holdings.sharded, self.holdings.zero
        self._full = FullParameters(self.holdings)
        self._parameters_of = {unit.name: list(unit.module.parameters()) for unit in ownership.units}
        # Those of other stages as well: every rank tells the dtype of a norm by all parameters.
        widened = module.parameters() if config.gradient_dtype == "float32" else ()
        self._wide = Fp32Gradients(each for each in widened if not self._sharded.has(each))
        # The parameters, by identity, that optimizers had to train when they were tried.
        self._tried: dict[Optimizer, list[int]] = {}
        self._updating: Optimizer | None = None
        self._broken = BrokenUpdates()
        self._ledger, self._settings = ledger, dict[str, object]()  # of the next update, beside the optimizer's
        self.reduction = Reduction(
            self.holdings,
            reduce_dtype(config),
            keeps_buffers=not config.broadcast_buffers,
            sums=replica_sums(mesh, delayed.device, config.ddp_reduction),
        )
        self._own = OwnParameters(module)
        self.whole_on: RestoreModule = "none" if mesh.spreads_model else "all"

    @property
    def whole_parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank's units that are not sharded, so they have their values between uses, too."""
        names = [name for name, stage in self.holdings.ownership.stage_of.items() if stage == self._mesh.stage]
        members = dict.fromkeys(parameter for name in names for parameter in self._parameters_of[name])
        return [each for each in members if not self._sharded.has(each)]

    @cached_property
    def unit_tensors(self) -> Mapping[int, UnitTensor]:
        """Tensors of units that lie on one stage each, by id, if a step may begin to write to them later.

        There is a teacher then: a unit that nothing trains and that is like one that is trained. The weights are
        neither in shards nor in parts.
        """
        ownership, mesh = self.holdings.ownership, self._mesh
        groups = [group for optimizer in self._tried for group in optimizer.param_groups]
        trained = {id(each) for group in groups for each in group["params"] if each.requires_grad}
        if not groups:
            trained = {id(each) for each in self._module.parameters() if each.requires_grad}
        if mesh.pp == 1 or mesh.tp > 1 or mesh.shard_group is not None or not has_teacher(ownership.units, trained):
            return {}
        residents = [(tensor, home) for _, tensor, home in ownership.residents() if len(home.holders) == 1]
        return {id(tensor): UnitTensor(tensor, home, id(tensor) in trained) for tensor, home in residents}

    @property
    def sums_wider(self) -> bool:
        """Whether gradients of some weights are added up in a wider dtype than that in which they are computed."""
        casts = compute_dtype(self._config) is not None
        return (
            casts
            or self._config.gradient_dtype == "float32"
            and any(is_half(p.dtype) for p in self.holdings.parameters)
        )

    @property
    def is_spread_as_made(self) -> bool:
        """Whether no rank has the full module, and it still has the parameters that this local model was made of."""
        return self.whole_on == "none" and self._own.are_those_of_now()

    @property
    def is_whole_here(self) -> bool:
        """Whether this rank has the full module."""
        return self.whole_on == "all" or (self.whole_on == "rank_zero" and self._mesh.rank == 0)

    # Passes over the model

    @property
    def reads_refused(self) -> str:
        """Reason why steps must not read values; empty: they may."""
        if self._mesh.shard_group is None or self._mesh.pp == 1 or self._config.gathers_once(self._mesh.pp):
            return ""
        return (
            "With `sdp_gather=use` ranks of a shard group wait for each other at each use of a unit, and with several "
            "stages for their stages as well: they would block each other for ever if a value led them to different "
            "units. Leave `sdp_gather` out, which gathers once per step, or do not read values."
        )

    @property
    def parameters_refused(self) -> str:
        """Reason why steps must not ask for gradients of parameters; empty: they may."""
        if self._split.parts.is_split:
            return "ranks of a tensor-parallel group have parts of parameters"
        return "" if self._mesh.pp == 1 else "it is on some of the stages only"

    def with_weights(self, unit: str, function: Callable[..., Any], token: object) -> Callable[..., Any]:
        """``function`` with weights in place; see :data:`smp_strategy.pipeline.stage.WithWeights`."""
        self._state.arrivals.wait_for(self._parameters_of[unit])
        return self._full.around(self._sharded.call(unit, function, token))

    def settle(self) -> None:
        """Wait for updated parameters that are still being broadcast to this rank, before anything reads them."""
        self.end_broken_update()
        self._state.arrivals.wait()

    @contextmanager
    def backward(self, *, continues: bool, sums: bool) -> Iterator[OngoingBackward]:
        """Context of a pass with backward. Its gradients will probably be added to those in ``.grad`` if it
        ``continues``; averaging over the replicas starts during it if it ``sums``. Collective.
        """
        averages = self.reduction.start() if sums else None
        contexts = [averages.watching] if averages is not None else []
        if sums:
            contexts.append(self._sharded.around_last)
        with (
            accumulating(self.holdings.parameters, continues=continues) as found,
            self._sharded.training(sums=sums),
        ):
            yield OngoingBackward(found, averages, partial(_all, contexts))
            if averages is not None:
                averages.send_rest(self.reduction.buffers.notes())

    def show_gradients(self, *, everyone: bool) -> None:
        """Let all replicas keep averaged gradients until the optimizer's step, or those only that apply them."""
        self._state.show_gradients(everyone=everyone)

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of a pass without backward. Collective."""
        self.settle()
        return self._sharded.evaluating()

    # Code of the user

    def show_in(self, views: Views, transport: Transport | None, optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        """Let ``views`` show weights, gradients and the state of ``optimizers``, of which this rank holds a share."""
        views.begin(self.holdings, self._full, transport)
        if self.holdings.updates_all:
            return

        def gather(optimizer: Optimizer) -> Any:
            meet("optimizer.state")
            return full.optimizer_state_on_all_ranks(self.holdings, optimizer)

        views.states = FullOptimizerState(optimizers, gather, self.holdings.keep_share)

    # The optimizer's step

    def unscale(self, optimizer: Optimizer, scale: float) -> UnscaleResult:
        """Divide the gradients of ``optimizer`` by ``scale``; see :meth:`smp_strategy.engine.engine.Engine.unscale`."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._wide.widen(parameters)
        with torch.no_grad():
            return agreed(unscale_gradients(parameters, scale), self._delayed.device)

    def begin_update(self, optimizer: Optimizer, settings: Mapping[str, object]) -> Tensor | None:
        """Before the step of ``optimizer``, whose ``settings`` ranks compare beside its own; see
        :meth:`smp_strategy.engine.engine.Engine.begin_update`.
        """
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        max_norm = self._config.sdp_gradient_clipping
        norm = None if max_norm is None else self.clip_grad_norm_(parameters, max_norm)
        self._try_optimizers([optimizer])
        self._note_update(optimizer, settings)
        self._state.begin_update(optimizer)
        self._wide.begin_update(parameters)
        self._sharded.show_pieces(parameters)
        self._updating = optimizer
        return norm

    def _note_update(self, optimizer: Optimizer, settings: Mapping[str, object]) -> None:
        """Let ranks compare the settings of an update. The result is looked at before the next update or save."""
        self._ledger.check()
        others, self._settings = {**settings, **self._settings}, {}
        values = of_optimizer(optimizer) | {name: plain(value) for name, value in others.items()}
        self._ledger.note(UPDATE, values)
        if not self._ledger.is_paced:
            self._ledger.begin(_UPDATES)

    def end_update(self, optimizer: Optimizer) -> None:
        """After the step of ``optimizer``; see :meth:`smp_strategy.engine.engine.Engine.end_update`."""
        self._updating = None
        self._state.end_update(optimizer)
        self._sharded.hide_pieces()

    def end_broken_update(self) -> bool:
        """End an update that an error has ended; returns whether there was one until now, of a share only."""
        if self._updating is not None:
            self._broken.note(is_of_part=not self.holdings.updates_all)
            self.end_update(self._updating)
        return self._broken.has_part

    def refuse_broken_update(self) -> None:
        """Before a step: end a broken update, and refuse weights of which only some ranks have updated theirs."""
        self.end_broken_update()
        self._broken.compare()

    def compare_updates(self) -> None:
        """Before values leave the ranks: refuse weights that ranks have updated differently. Collective."""
        self.refuse_broken_update()
        self.holdings.parts.group.settle()
        self._ledger.settle(_UPDATES)

    @contextmanager
    def changing_weights(self, optimizer: Optimizer) -> Iterator[None]:
        """Changes of weights without a step; see :meth:`smp_strategy.engine.engine.Engine.changing_weights`."""
        self._try_optimizers([optimizer])
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._sharded.show_pieces(parameters)
        try:
            with self._state.changing_weights(optimizer), _no_new_states(optimizer):
                yield
        finally:
            self._sharded.hide_pieces()

    def clip_grad_norm_(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the global gradient norm; see :meth:`smp_strategy.engine.engine.Engine.clip_grad_norm_`."""
        self._settings["the largest norm of gradients, to which they are clipped"] = max_norm
        self._wide.widen(parameters)
        norm = self.reduction.norm(parameters, norm_type)
        local = [parameter for parameter in parameters if parameter.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(local, max_norm, norm)
        return norm

    # Values

    def restore(self, where: RestoreModule) -> None:
        """Restore the full module on the ranks ``where``. Collective."""
        self.compare_updates()
        self.settle()
        if where == "all":
            self._wide.end()
            self.reduction.buffers.meet_entirely()
        if self.whole_on == "all" or where == "none":
            return
        mesh = self._mesh
        if mesh.shape.world_size > 1:
            collectives.barrier("the whole module, at the end of a run")
        with self._split.in_parts():
            if where == "all" or mesh.replicate_rank == 0 or self._sharded.deals_out:
                self._sharded.restore(keep=where == "all" or mesh.dp_rank == 0, is_last=where == "all")
            # All ranks of rank 0's tensor-parallel group take their parts from all stages; `to_dense` joins them later.
            keep = where == "all" or (mesh.dp_rank == 0 and mesh.pp_rank == 0)
            if where == "all" or mesh.dp_rank == 0:
                restore(self.holdings, keep=keep)
        if keep:
            self._split.to_dense()
        self.whole_on = where

    def full_state_dict(self, take: full.Take) -> dict[str, Any]:
        """Full state dict on rank 0: see ``SavedState`` (:mod:`smp_strategy.engine.saving.checkpointing`)."""
        self.compare_updates()
        self.settle()
        if self.whole_on != "none":
            return self._module.state_dict() if self._mesh.rank == 0 else {}
        return full.state_dict(self.holdings, take)

    def load_state_dict(self, state: dict[str, Any], *, strict: bool) -> None:
        """Load this rank's share of a full state dict, or all of it if the module is full here."""
        self.settle()
        if self.is_whole_here:
            self._module.load_state_dict(state, strict=strict)
        else:
            entries = {f"{MODULE}.{name}": value for name, value in state.items()}
            load_module(self._module, WholeState(entries), self.holdings, strict=strict)

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Cut the state that ``optimizers`` have for full parameters to this rank's share.

        Raises:
            ConfigError: some of them cannot update pieces of parameters.
        """
        self._try_optimizers(optimizers)
        for optimizer in optimizers:
            self.holdings.keep_share(optimizer)
            if self.whole_on == "none" or self._state.is_on:
                mark_own_states(optimizer)

    def _try_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that need more than a rank has, also after parameters were added or unfrozen."""
        self._own.refuse_others(optimizers)
        if self.holdings.updates_all:
            return
        new = {each: trained for each in optimizers if (trained := _trained_by(each)) != self._tried.get(each)}
        if not new:
            return
        # Names of all stages' parameters, so that all ranks raise the same error.
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        held, problems = self.holdings, list[str]()
        if held.is_divided:
            problems = problems_of_dependence(new, held.updaters, names, self._divided_by)
        split = {parameter: (names[parameter], cut.dim) for parameter, cut in self._split.cuts.items()}
        problems += problems_of_cuts(new, held.sharded_names, degree=self._mesh.shape.dp_shard, split=split)
        if problems:
            raise ConfigError(problems)
        self._tried.update(new)

    @property
    def _divided_by(self) -> dict[str, object]:
        """Options that let each rank update some of the parameters, with their values."""
        options: dict[str, object] = {"pipeline_parallel_degree": self._mesh.pp} if self._mesh.pp > 1 else {}
        return {**options, "shard_optimizer_state": True} if self._state.is_on else options

    def close(self) -> None:
        """End background work."""
        self._sharded.close()
        self.reduction.close()


def _trained_by(optimizer: Optimizer) -> list[int]:
    return [id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


@contextmanager
def _all(contexts: Iterable[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


@contextmanager
def _no_new_states(optimizer: Optimizer) -> Iterator[None]:
    """Remove empty states on exit: reading ``optimizer.state[p]`` makes one, also for a ``p`` of another rank."""
    before = set(optimizer.state)
    try:
        yield
    finally:
        for parameter in [each for each, state in optimizer.state.items() if not state and each not in before]:
            del optimizer.state[parameter]
