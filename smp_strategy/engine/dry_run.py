"""The step without its arithmetic: one pass over the user's code with units that only say what they would return.

It tells the order of the units, the flow of values and what everything costs, before anything is placed anywhere. The
code it runs is the user's, so it must leave no trace: it works on a copy of the batch, draws from random streams of
its own, and whatever it does to the module (counters, lists of losses, buffers of the glue) and to variables around its
functions is undone.
"""

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.engine.unit_calls import UnitCalls
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import home_of
from smp_strategy.model.rng import seeded
from smp_strategy.model.trace.context_containers import collectors
from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.prediction import Callee, ValueNeededError
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.trace.snapshot import Snapshot
from smp_strategy.model.trace.undo_iterators import iterators_rewound
from smp_strategy.model.trace.undo_variables import variables_restored
from smp_strategy.model.units import Unit
from smp_strategy.pipeline.glue_parameters import GlueUses
from smp_strategy.pipeline.job import Step
from smp_strategy.pipeline.kept_tensors import refuse_kept
from smp_strategy.pipeline.microbatch_state import MicrobatchState, reached_by_hooks
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.surveys import survey
from smp_strategy.pipeline.user_collectives import Replicas
from smp_strategy.planning.profiling.recorded_calls import CallLog, RecordedCall

__all__ = ["DryRun", "DryRunInput", "dry_run", "look_for_exposed", "rescaled_tables", "run_for_real", "undone"]


@final
@dataclass(frozen=True)
class DryRun:
    """What a dry run has found out."""

    trace: Trace | None
    """The events; ``None`` where the step looks at values, which a dry run does not have."""
    used_by_glue: tuple[Tensor, ...]
    """Parameters and tables of units that code above the units computes with."""
    calls: tuple[RecordedCall, ...] = ()
    """The calls of units."""


@final
@dataclass(frozen=True, kw_only=True)
class DryRunInput:
    """What a dry run runs on."""

    module: nn.Module
    """The whole module."""
    units: Sequence[Unit]
    calls: UnitCalls
    """Where calls of the units arrive."""
    oracle: ShapeInference
    """Predicts results and keeps the predictions for later."""
    device: torch.device
    """Where the step will run."""
    optimizers: Sequence[Optimizer] = ()
    """What trains the module, if that is known."""
    num_microbatches: int = 1
    """Microbatches of a step that take turns."""
    replicas: Replicas = field(default_factory=Replicas)
    """The ranks that the user's code takes for all ranks."""


def dry_run(
    step: Step,
    microbatch: Any,
    loss_of: Callable[[Any], Tensor | None] | None,
    surroundings: DryRunInput,
) -> DryRun:
    """Run ``step`` dry.

    Args:
        step: the user's code.
        microbatch: what it gets.
        loss_of: picks the loss out of what it returns; ``None`` for a forward-only step.
        surroundings: what it runs on.

    Raises:
        UnsupportedError: the glue changes tensors of units in place, or looks at values of a module without any.
    """
    has_values = not any(parameter.is_meta for parameter in surroundings.module.parameters())
    for computes in (False, True) if has_values else (False,):
        try:
            # With gradients also where the first step is a validation step: the partition weighs what training keeps.
            with torch.inference_mode(False), torch.enable_grad():
                return _survey(step, microbatch, loss_of, surroundings, computes=computes)
        except ValueNeededError as error:
            if not has_values:
                raise UnsupportedError(
                    f"The step looks at a value (`{error}`), but the module is on the meta device and has none. Put "
                    "the module on the CPU, or plan with `skip_tracing=True`."
                ) from None
            # A step that looks at values is run for real: every rank still has the whole module.
            continue
    return DryRun(None, ())


def run_for_real(
    step: Step, microbatch: Any, loss_of: Callable[[Any], Tensor | None] | None, surroundings: DryRunInput
) -> None:
    """Run ``step`` once with values, and undo what it does, for somebody who watches. The module is still whole.

    Args:
        step: the user's code.
        microbatch: what it gets.
        loss_of: picks the loss out of what it returns.
        surroundings: what it runs on.
    """
    # What units return as a whole is not what they will return in parts: predictions made here must not be kept.
    own = replace(surroundings, oracle=ShapeInference(surroundings.device))
    with torch.inference_mode(False):
        _survey(step, microbatch, loss_of, own, computes=True)


def look_for_exposed(step: Step, microbatch: Any, surroundings: DryRunInput, *, has_values: bool = False) -> DryRun:
    """Run a later kind of step dry, too, because it may read attributes of units that the first one has not read.

    Args:
        step: the user's code.
        microbatch: what it gets.
        surroundings: what it runs on.
        has_values: whether all units can still run here.
    """
    try:
        return _survey(step, microbatch, None, surroundings, computes=False)
    except ValueNeededError:
        if has_values:
            return _survey(step, microbatch, None, surroundings, computes=True)
        # It cannot be run for real any more. What it may still read is what gradients could flow through.
        surroundings.calls.leftovers.use_all_with_gradient()
        surroundings.calls.expose()
        return DryRun(None, ())


def _survey(
    step: Step,
    microbatch: Any,
    loss_of: Callable[[Any], Tensor | None] | None,
    surroundings: DryRunInput,
    *,
    computes: bool,
) -> DryRun:
    """Run ``step`` to look at it: again as long as that shows attributes of units that others use."""
    module, units, calls = surroundings.module, surroundings.units, surroundings.calls
    leftovers, before, device = calls.leftovers, calls.runtime, surroundings.device
    inside = {id(part) for unit in units for part in unit.module.modules()}
    leftovers.around = reached_by_hooks([part for unit in units for part in unit.module.modules()])
    leftovers.above = {name: part for name, part in module.named_modules() if id(part) not in inside}
    stage = Stage(
        number=0 if computes else -1,
        stage_of={unit.name: 0 for unit in units},
        num_stages=1,
        oracle=surroundings.oracle,
        transport=None,
        device=device,
        leftovers=leftovers,
        replicas=surroundings.replicas,
    )
    uses = GlueUses(units, lambda: runtime.running_unit, leftovers)
    log = CallLog(device.type)
    private = MicrobatchState(list(leftovers.above.values()), [unit.module for unit in units], switches=calls.switches)

    def called(callee: Callee, args: Any, kwargs: Any) -> None:
        log.note(callee, args, kwargs)
        private.look()

    runtime = calls.runtime = Runtime(stage, told=uses.note, called=called, written=private.touch)
    try:
        while True:
            leftovers.next_round()
            log.calls.clear()
            try:
                with undone(step, surroundings, computes=computes), uses:
                    with private.learning(step):
                        trace = survey(runtime, step, copy.deepcopy(microbatch), loss_of)
                    calls_made = tuple(log.calls)
                    if surroundings.num_microbatches > 1 and not computes and not leftovers.has_news:
                        _try_another(runtime, private, step, copy.deepcopy(microbatch), loss_of)
            except Exception:
                if not leftovers.has_news:
                    raise
            if not leftovers.has_news:
                return DryRun(trace, tuple(uses.found.values()), calls_made)
            calls.expose()
    finally:
        leftovers.let_go()
        runtime.close()
        calls.runtime = before


def _try_another(
    runtime: Runtime,
    private: MicrobatchState,
    step: Step,
    microbatch: Any,
    loss_of: Callable[[Any], Tensor | None] | None,
) -> None:
    """Run the next microbatch dry, too, after what the first one has left.

    Where microbatches take turns, one may begin before an earlier one has left what it would find in one process
    (a running sum, say), and nobody would notice.

    Raises:
        UnsupportedError: it uses a tensor of the first one.
    """
    with refuse_kept(), suppress(ValueNeededError), private.learning(step):
        survey(runtime, step, microbatch, loss_of)


def rescaled_tables(units: Sequence[Unit]) -> Iterator[Tensor]:
    """Weights that their own layers change as they run: embeddings rescale the rows that are used (``max_norm``)."""
    inside = [part for unit in units for part in unit.module.modules()]
    tables = [part for part in inside if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    yield from (table.weight for table in tables if table.max_norm is not None)


@contextmanager
def undone(step: Step, surroundings: DryRunInput, *, computes: bool) -> Iterator[None]:
    """In here ``step`` runs without a trace: it draws from random streams of its own, and its changes are undone.

    Args:
        step: the user's code.
        surroundings: what it runs on.
        computes: whether the units run for real.

    Raises:
        UnsupportedError: the glue changes parameters of units in place.
    """
    module = surroundings.module
    with (
        seeded(0, surroundings.device),
        _untouched(module, surroundings.units, computes),
        variables_restored(module.modules(), step),
    ):
        yield


@contextmanager
def _untouched(module: nn.Module, units: Sequence[Unit], computes: bool) -> Iterator[None]:
    """Undo what the step does to the module (buffers, attributes, and what lists and dicts in attributes hold) and to
    containers in context variables; let it print nothing.

    Raises:
        UnsupportedError: the glue changes parameters of units in place.
    """
    rescaled = {id(table): (table, table.detach().clone()) for table in rescaled_tables(units) if computes}
    placed = {id(parameter): parameter for unit in units for parameter in unit.module.parameters()}
    versions = {key: parameter._version for key, parameter in placed.items()}
    # Those of other stages, where the module is spread already, cannot change here.
    present = [b for owner in module.modules() for b in owner._buffers.values() if b is not None and home_of(b) is None]
    buffers = [(buffer, _version(buffer), buffer.clone()) for buffer in present]
    collected = [container for _, container in collectors()]
    switches = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    inside = [part for unit in units for part in unit.module.modules()]
    held = [value for part in module.modules() for value in vars(part).values()]
    with (
        iterators_rewound(map(vars, module.modules())),
        Snapshot(modules=module.modules(), objects=held, tensors_of=inside, containers=collected),
        redirect_stdout(io.StringIO()),
    ):
        try:
            yield
        finally:
            for parameter, requires_grad in switches:
                parameter.requires_grad_(requires_grad)
            with torch.no_grad():
                for buffer, version, value in buffers:
                    # Replicas agree on a buffer whose version goes up, so one that has not changed keeps its version.
                    # Some kernels change a buffer without that, and inference tensors have no version.
                    if computes or version is None or version != _version(buffer):
                        buffer.copy_(value)
                for table, value in rescaled.values():
                    table.copy_(value)
    changed = {key for key, parameter in placed.items() if parameter._version != versions[key]} - rescaled.keys()
    names = [name for name, parameter in module.named_parameters() if id(parameter) in changed]
    if names:
        raise UnsupportedError(
            f"The step changes {', '.join(names[:3])}{' ...' * (len(names) > 3)} in place from outside of the units "
            "that own them, but each stage has the weights of its own units only. Move this into a module."
        )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
