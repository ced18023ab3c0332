"""The engine: the only file that knows every part.

Life of a model under the engine:

1. :meth:`Engine.attach`: choose units, build the mesh, make initial values equal on all ranks. Every rank still
   holds the whole model, so optimizers, callbacks and checkpoints meet an ordinary module.
2. The first step: its microbatch is traced without computing, the partition is decided and every rank lets go of the
   units of other stages.
3. Every step: cut the batch, run the user's step once per microbatch under the schedule, hand out the results.
4. :meth:`Engine.detach`: the module becomes an ordinary one again, on every rank that asks for it.

Gradients are handed over separately (:meth:`TrainStep.commit`), because in Lightning and Accelerate the step comes
first, then ``zero_grad``, then ``backward``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.agreement import check_same_partition, start_alike
from smp_strategy.checkpoint import full
from smp_strategy.checkpoint.restore import restore
from smp_strategy.config import RestoreModule, SMPConfig
from smp_strategy.dry_run import DryRun, dry_run
from smp_strategy.errors import ConfigError, SMPError
from smp_strategy.hook_view import HookView, Views
from smp_strategy.interception import UnitCalls
from smp_strategy.mesh import ProcessMesh
from smp_strategy.optim.gradients import average_gradients, sum_gradients
from smp_strategy.optim.norm import global_norm
from smp_strategy.ownership import Ownership
from smp_strategy.partition.partition import Partition
from smp_strategy.partition.problem import event_times, problem_of
from smp_strategy.partition.solver import solve
from smp_strategy.pipeline.microbatch import split
from smp_strategy.pipeline.rng import derive_seed
from smp_strategy.pipeline.routing import route
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.pipeline.simulate import simulate
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.transport import Transport
from smp_strategy.pipeline.turns import Job, Step, StepRun
from smp_strategy.report import render_layout, render_schedule
from smp_strategy.shape import choose_shape
from smp_strategy.trace.events import Trace
from smp_strategy.trace.oracle import Oracle
from smp_strategy.units import Unit, choose_units

__all__ = ["Engine", "EvalStep", "TrainStep"]

# Random streams beside that of the training steps: what evaluation and hooks draw must not change training.
EVALUATION, HOOK = 1, 2
# Batches of every size and path have a plan of their own; a step that never repeats one must not fill the memory.
MOST_PLANS = 256


@final
@dataclass(frozen=True)
class EvalStep:
    """Results of a forward-only step, the same on every rank of a replica."""

    outputs: list[Any]
    """What the step returned for each microbatch, with real detached tensors."""
    sizes: tuple[int, ...]
    """Samples in each microbatch."""


@final
@dataclass(frozen=True)
class TrainStep:
    """Results of a training step, and its gradients until they are handed over."""

    outputs: list[Any]
    """What the step returned for each microbatch, with real detached tensors."""
    sizes: tuple[int, ...]
    """Samples in each microbatch."""
    loss: Tensor
    """Mean over the samples of the batch; a scalar, the same on every rank of a replica."""
    _gradients: dict[nn.Parameter, Tensor]
    _reduce: Callable[[], None]

    def commit(self, grad_output: Tensor, *, reduce: bool) -> None:
        """Add ``grad_output`` times the gradient of the mean loss to ``.grad`` of this rank's parameters.

        Args:
            grad_output: gradient of whatever is minimised with respect to the loss; a scalar.
            reduce: this was the last step before the optimizer's: add up what several stages hold, and average over
                the replicas. Collective over the ranks.
        """
        factor = grad_output.item()
        for parameter, gradient in self._gradients.items():
            if factor != 1.0:
                gradient.mul_(factor)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self._gradients.clear()
        if reduce:
            self._reduce()


@final
class Engine:
    """Runs a module under the layout that a configuration asks for. One engine serves one module.

    Args:
        config: all options.
        report: called with text for the user (mesh and partition, then the schedule), the same on every rank.
        device: where this rank computes.
        timeout: longest wait for another rank; ``None``: that of the backend.

    Attributes:
        partition: which unit goes to which stage, once it is decided.
        views: what hooks that run just now see.
        copies: asked for copies of the module that callbacks have made before it is spread; they are spread with it.
    """

    def __init__(
        self,
        config: SMPConfig,
        *,
        report: Callable[[str], None] = lambda text: None,
        device: torch.device | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.config = config
        self._timeout = timeout
        self.partition: Partition | None = None
        self._report = report
        self._device = device or torch.device("cpu")
        if self._device.type != "cpu":
            raise ConfigError(
                f"This rank computes on {self._device}, but pipelines on accelerators are not built yet. "
                'Use `accelerator="cpu"`.'
            )
        self._oracle = Oracle(self._device)
        self._module: nn.Module | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._units: list[Unit] = []
        self._mesh: ProcessMesh | None = None
        self._calls = UnitCalls()
        self._ownership: Ownership | None = None
        self._groups: dict[frozenset[int], dist.ProcessGroup] = {}
        self._used_by_glue: tuple[nn.Parameter, ...] = ()
        # Where the module has all its values: on all ranks, on rank 0, or nowhere because it is spread over stages.
        self._whole_on: RestoreModule = "all"
        self.views = Views()
        self.copies: Callable[[], Iterable[nn.Module]] = tuple
        self._traces: dict[str, Trace] = {}
        self._plans: dict[tuple[int, int], Plan] = {}
        self._seed = 0
        self._num_steps = 0
        self._num_evaluations = 0
        self._reported_schedule = False

    # Setting up

    @property
    def mesh(self) -> ProcessMesh:
        """This rank's place among the ranks; exists once a module is attached."""
        if self._mesh is None:
            raise SMPError("The process mesh does not exist before a module is attached to the engine.")
        return self._mesh

    def attach(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        """Take on ``module``, whole on every rank; collective. One that was detached is spread as before.

        Raises:
            ConfigError: the degrees do not fit the number of ranks or of units.
            SMPError: the engine already serves another module.
        """
        if self._module is not None and not self.serves(module):
            raise SMPError("This engine already serves another module. Use a new strategy object for a new module.")
        self._optimizers = optimizers
        if self._calls.are_intercepted:
            return
        if self._module is None:
            shape = choose_shape(self.config, module, self._report)
            self._module = module
            self._mesh = ProcessMesh(shape, device_type=self._device.type, timeout=self._timeout)
            self._units = choose_units(module, shape.pp)
            self._seed = start_alike(module)
        else:
            start_alike(module)
        self._calls.intercept(self._units)

    def serves(self, module: nn.Module) -> bool:
        """Whether this engine has taken on ``module``, with the units that it has now."""
        if self._module is not module:
            return False
        units = choose_units(module, self.mesh.pp)
        return [id(unit.module) for unit in units] == [id(unit.module) for unit in self._units]

    def detach(self, *, failed: bool = False) -> None:
        """Let go of the module; :meth:`attach` takes it on again. Collective unless the run has failed.

        Calls reach the module directly again, and the ranks that ``restore_module`` names get all of its values back.
        The state of the optimizers stays where it is.

        Args:
            failed: the other ranks may not come here; the module stays as it is.
        """
        self._calls.give_back()
        if not failed:
            self._restore(self.config.restore_module)

    @property
    def is_spread(self) -> bool:
        """Whether ranks lack values of the module."""
        return self._whole_on != "all"

    def restore_everywhere(self) -> None:
        """Give every rank the whole module, whatever the options say. Collective."""
        self._restore("all")

    def _restore(self, where: RestoreModule) -> None:
        if not self.is_spread or where == "none":
            return
        assert self._module is not None
        assert self._ownership is not None
        if where == "all" or self.mesh.dp_rank == 0:
            keep = where == "all" or self.mesh.rank == 0
            restore(self._module, self._units, self._ownership, self.mesh, keep=keep)
        self._whole_on = where

    # The first step

    def _spread(self, kind: str, step: Step, microbatch: Any, loss_of: Callable[[Any], Tensor] | None) -> None:
        """Let go of what belongs to other stages, after the partition that is kept, or the one that is made now."""
        assert self._module is not None
        if self.partition is None:
            self._decide(kind, step, microbatch, loss_of)
        assert self.partition is not None
        stage_of = self.partition.stage_of
        # Anew each time: buffers may have been replaced in the meantime.
        self._ownership = Ownership(self._module, self._units, stage_of, self.mesh.pp, used_by_glue=self._used_by_glue)
        self._release()
        transport = None
        if self.mesh.pp > 1:
            transport = Transport(self.mesh.stage_ranks, self.mesh.pp_group, self._timeout)
        stage = Stage(
            number=self.mesh.stage,
            stage_of=stage_of,
            num_stages=self.mesh.pp,
            oracle=self._oracle,
            transport=transport,
            device=self._device,
        )
        self._calls.runtime = Runtime(stage)

    def _decide(self, kind: str, step: Step, microbatch: Any, loss_of: Callable[[Any], Tensor] | None) -> None:
        """Trace and partition."""
        assert self._module is not None
        found = DryRun(None, ())
        if not self.config.skip_tracing:
            found = dry_run(
                step,
                microbatch,
                loss_of,
                module=self._module,
                units=self._units,
                calls=self._calls,
                oracle=self._oracle,
                device=self._device,
            )
        parameters = {
            unit.name: {index_of: parameter.nbytes for index_of, parameter in self._numbered(unit)}
            for unit in self._units
        }
        problem = problem_of(
            found.trace or Trace([]),
            parameters,
            num_stages=self.mesh.pp,
            memory_weight=self.config.resolved_memory_weight,
        )
        self.partition = Partition.of(problem, solve(problem))
        check_same_partition(self.partition)
        self._used_by_glue = found.used_by_glue
        if found.trace is not None and loss_of is not None:
            self._traces[kind] = found.trace
        self._report(render_layout(self.mesh.shape, self.partition))
        if self.config.partition_file and self.mesh.rank == 0:
            self.partition.save(self.config.partition_file)

    def _numbered(self, unit: Unit) -> list[tuple[int, nn.Parameter]]:
        """The unit's parameters with numbers that are the same on every rank."""
        assert self._module is not None
        numbers = {id(parameter): number for number, parameter in enumerate(self._module.parameters())}
        return [(numbers[id(parameter)], parameter) for parameter in unit.module.parameters()]

    def _release(self) -> None:
        assert self._ownership is not None
        mesh, ownership = self.mesh, self._ownership
        ownership.release(mesh.stage, self.copies())
        self._whole_on = "none" if mesh.pp > 1 else "all"
        local = {id(parameter) for parameter in ownership.local_parameters(mesh.stage)}
        for optimizer in self._optimizers:
            for parameter in [parameter for parameter in optimizer.state if id(parameter) not in local]:
                del optimizer.state[parameter]
        for stages in ownership.shared():
            if mesh.stage not in stages or stages in self._groups:
                continue
            ranks = [mesh.stage_ranks[stage] for stage in sorted(stages)]
            whole = len(ranks) == mesh.pp
            self._groups[stages] = (
                mesh.pp_group if whole else dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
            )

    # Every step

    def train_step(self, step: Step, batch: Any, *, loss_of: Callable[[Any], Tensor]) -> TrainStep:
        """Forward and backward of a batch.

        Args:
            step: the user's code for one microbatch. At the first call it runs once more, as a dry run.
            batch: cut along dim 0 into microbatches.
            loss_of: picks the loss out of what ``step`` returns.
        """
        microbatches, sizes = split(batch, self.config.num_microbatches(self.mesh.pp))
        if self._calls.runtime is None:
            self._spread("train", step, microbatches[0], loss_of)
        assert self._ownership is not None
        parameters = self._ownership.local_parameters(self.mesh.stage)
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        total = sum(sizes) or 1
        weights = [size / total for size in sizes]
        self._num_steps += 1
        seed = derive_seed(self._seed, self.mesh.dp_rank, self._num_steps)
        try:
            run = self._run("train", Job(step=step, seed=seed, loss_of=loss_of, weights=weights), microbatches)
            gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        losses = torch.stack([loss.reshape(()) for loss in run.losses])
        loss = (losses * losses.new_tensor(weights)).sum()
        return TrainStep(run.outputs, sizes, loss, gradients, self._reduce_gradients)

    def eval_step(self, step: Step, batch: Any, *, kind: str = "eval") -> EvalStep:
        """Forward of a batch.

        Args:
            step: the user's code for one microbatch.
            batch: cut along dim 0 into microbatches.
            kind: steps of one kind share a schedule; say ``"validation"`` or ``"predict"``.
        """
        microbatches, sizes = split(batch, self.config.num_microbatches(self.mesh.pp))
        if self._calls.runtime is None:
            self._spread(kind, step, microbatches[0], None)
        self._num_evaluations += 1
        seed = derive_seed(self._seed, self.mesh.dp_rank, self._num_steps, EVALUATION, self._num_evaluations)
        run = self._run(kind, Job(step=step, seed=seed), microbatches)
        return EvalStep(run.outputs, sizes)

    def _run(self, kind: str, job: Job, microbatches: Sequence[Any]) -> StepRun:
        assert self._calls.runtime is not None
        plan = self._plan(kind, len(microbatches))
        if plan is not None:
            job = replace(job, expected=self._traces[kind].path)
        run = self._calls.runtime.run(job, microbatches, plan)
        # The step may take another path next time: the plan follows the latest trace.
        if kind not in self._traces or self._traces[kind].signature != run.trace.signature:
            self._traces[kind] = run.trace
        return run

    def _plan(self, kind: str, num_microbatches: int) -> Plan | None:
        trace = self._traces.get(kind)
        if trace is None or self.partition is None:
            return None
        key = (trace.signature, num_microbatches)
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            flow = route(trace, self.partition.stage_of, self.mesh.pp, event_times(trace.events))
            self._plans[key] = simulate(
                flow,
                num_microbatches,
                policy=self.config.pipeline,
                active_microbatches=self.config.max_active_microbatches(self.mesh.pp),
            )
            if kind == "train" and not self._reported_schedule:
                self._report(render_schedule(self._plans[key]))
                self._reported_schedule = True
        return self._plans[key]

    def call_with_values(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, unknown: Callable[[], Any]
    ) -> Any:
        """Call ``function`` in a step, on every stage, with real tensors in the place of placed ones.

        Args:
            function: what needs values, a metric for instance.
            args, kwargs: its arguments.
            unknown: stands in for it in the dry run, where nothing has a value.
        """
        if self._calls.runtime is None:
            return function(*args, **kwargs)
        return self._calls.runtime.call_with_values(function, args, kwargs, unknown=unknown)

    # Gradients

    def _reduce_gradients(self) -> None:
        assert self._ownership is not None
        for stages, parameters in self._ownership.shared().items():
            if self.mesh.stage in stages:
                sum_gradients(parameters, self._groups[stages])
        average_gradients(self._ownership.local_parameters(self.mesh.stage), self.mesh.dp_group)

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``; returns the norm before, everywhere.

        Args:
            parameters: what to clip: the same list on every rank, as an optimizer has it.
            max_norm: the largest norm that is left alone.
            norm_type: order of the norm.
        """
        assert self._ownership is not None
        ownership, stage = self._ownership, self.mesh.stage
        parameters = list(parameters)
        with self.views.put_aside():
            norm = global_norm(
                parameters,
                lambda parameter: min(ownership.holders(parameter)) == stage,
                self.mesh.pp_group,
                norm_type,
            )
            local = [parameter for parameter in parameters if parameter.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(local, max_norm, norm)
        return norm

    def run_hook(self, hook: Callable[[], Any]) -> Any:
        """Run the user's ``hook`` with weights and gradients of all stages in sight; collective over a replica.

        Returns:
            What ``hook`` returns, with real tensors on every rank.
        """
        if self._calls.runtime is None or self.mesh.pp == 1 or self.views.is_open:
            return hook()
        assert self._module is not None
        assert self._ownership is not None
        seed = derive_seed(self._seed, self.mesh.dp_rank, self._num_steps, HOOK)
        parameters = list(self._module.parameters())
        view = HookView(parameters, self._ownership, self.mesh, self.views.foresight, seed=seed)
        self._calls.in_hook = True
        try:
            return self.views.run(hook, view, self._calls.runtime, seed=seed)
        finally:
            self._calls.in_hook = False

    # State

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state dict as one process would have it, on global rank 0; ``{}`` elsewhere. Collective."""
        assert self._module is not None
        return full.state_dict(self._module, self._ownership if self._whole_on == "none" else None, self.mesh)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` as one process would have it, on global rank 0; ``{}`` elsewhere. Collective."""
        return full.optimizer_state(optimizer, self._ownership, self.mesh)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a whole state dict; this rank keeps its share."""
        assert self._module is not None
        is_whole_here = self._whole_on == "all" or (self._whole_on == "rank_zero" and self.mesh.rank == 0)
        full.load_state_dict(
            self._module, state_dict, None if is_whole_here else self._ownership, self.mesh, strict=strict
        )

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a whole optimizer state dict; this rank keeps its share."""
        full.load_optimizer_state(optimizer, state, self._ownership, self.mesh)

    def state_dict(self) -> dict[str, int]:
        """The engine's own state: where its random streams are."""
        return {"seed": self._seed, "num_steps": self._num_steps}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue the random streams of another run."""
        self._seed, self._num_steps = state["seed"], state["num_steps"]

    def close(self) -> None:
        """End the engine's threads; the module stays as it is."""
        self._calls.close()
