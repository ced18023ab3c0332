"""Dry run: one pass over the user's step in which units return predicted metadata instead of computing.

It finds the order of unit calls, the flow of values and all costs, before anything is placed. The code is the user's,
so a dry run leaves no trace: it works on a copy of the batch, draws from random streams of its own, and undoes changes
to the module (counters, lists of losses, buffers of the glue) and to variables around its functions.
"""

import copy
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.engine.unit_calls import UnitCalls
from smp_strategy.engine.written_weights import WrittenWeights
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.ownership import home_of
from smp_strategy.model.rng import seeded
from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.places import reached_by_hooks
from smp_strategy.model.trace.prediction import Callee, ValueNeededError
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.trace.side_effects import collectors
from smp_strategy.model.trace.snapshot import Snapshot
from smp_strategy.model.trace.undo_variables import iterators_rewound, variables_restored
from smp_strategy.model.units import Unit
from smp_strategy.pipeline.batch_loss.batch_record import BatchRecord, joined
from smp_strategy.pipeline.batch_loss.sample_watch import SampleWatch
from smp_strategy.pipeline.dist_calls.user_collectives import Replicas
from smp_strategy.pipeline.isolation.microbatch_state import MicrobatchState
from smp_strategy.pipeline.job import Step
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.shared_tensors.glue_parameters import GlueUses
from smp_strategy.pipeline.shared_tensors.kept_tensors import refuse_kept
from smp_strategy.pipeline.shared_tensors.weight_operations import trained_weights_written
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.surveys import survey
from smp_strategy.planning.profiling.recorded_calls import CallLog, RecordedCall

__all__ = ["DryRun", "DryRunInput", "dry_run", "look_for_exposed", "rescaled_tables", "run_for_real", "undone"]


@final
@dataclass(frozen=True)
class DryRun:
    """Result of a dry run."""

    trace: Trace | None
    """Events; ``None`` if the step reads values, which a dry run does not have."""
    used_by_glue: tuple[Tensor, ...]
    """Parameters and tables of units that code above the units computes with."""
    calls: tuple[RecordedCall, ...] = ()
    comparison: str = ""
    """Operation with which the loss compares samples of the microbatch; empty: it does not, as far as is known."""


@final
@dataclass(frozen=True, kw_only=True)
class DryRunInput:
    """Module and environment of a dry run."""

    module: nn.Module
    units: Sequence[Unit]
    calls: UnitCalls
    shape_inference: ShapeInference
    device: torch.device
    optimizers: Sequence[Optimizer] = ()
    num_microbatches: int = 1
    """Number of microbatches of a step that take turns."""
    batch: tuple[Sequence[Any], Sequence[int]] | None = None
    """All microbatches, and their numbers of samples, if a loss that compares samples is looked for."""
    lacking: Mapping[int, str] = field(default_factory=dict)
    """Names of tensors of units that some ranks do not have in steps, by id."""
    replicas: Replicas = field(default_factory=Replicas)
    """Ranks that the user's code takes for all ranks."""
    begins_empty: bool = False
    """Whether each step begins without gradients, as far as is known."""


def dry_run(
    step: Step,
    microbatch: Any,
    loss_of: Callable[[Any], Tensor | None] | None,
    inputs: DryRunInput,
) -> DryRun:
    """Trace ``step`` in a dry run; if it reads values, in a run that computes. Without ``loss_of`` it is a forward-only
    step.

    Raises:
        UnsupportedError: the glue changes tensors of units in place, or reads values of a module without any.
    """
    has_values = not any(parameter.is_meta for parameter in inputs.module.parameters())
    for computes in (False, True) if has_values else (False,):
        try:
            # Gradients are enabled for a validation step, too: the partition must account for the memory of training.
            with torch.inference_mode(False), torch.enable_grad():
                return _survey(step, microbatch, loss_of, inputs, computes=computes)
        except ValueNeededError as error:
            if not has_values:
                hint = (
                    " If the step is wrong there, repair it or its example of a batch."
                    if "Error:" in str(error)
                    else ""
                )
                raise UnsupportedError(
                    f"The step looks at a value (`{error}`), but the module is on the meta device and has none. Put "
                    f"the module on the CPU, or plan with `skip_tracing=True`.{hint}"
                ) from None
            # Next attempt: compute. Every rank still has the full module.
            continue
    return DryRun(None, ())


def run_for_real(
    step: Step, microbatch: Any, loss_of: Callable[[Any], Tensor | None] | None, inputs: DryRunInput
) -> None:
    """Run ``step`` once with values and undo its changes, for callers that observe it. The module is still full."""
    # Layers are about to be split and will return other metadata, so predictions made here must not be cached.
    own = replace(inputs, shape_inference=ShapeInference(inputs.device))
    with torch.inference_mode(False):
        _survey(step, microbatch, loss_of, own, computes=True)


def look_for_exposed(
    step: Step,
    microbatch: Any,
    inputs: DryRunInput,
    *,
    loss_of: Callable[[Any], Tensor | None] | None = None,
    has_values: bool = False,
) -> DryRun:
    """Dry run of a later kind of step, which may read attributes of units that the first one has not read; with values
    if all units can still run here.
    """
    try:
        return _survey(step, microbatch, loss_of, inputs, computes=False)
    except ValueNeededError:
        if has_values:
            return _survey(step, microbatch, loss_of, inputs, computes=True)
        # Reads cannot be observed without values. Only attributes with a gradient can matter, so expose all of them.
        inputs.calls.exposed.use_all_with_gradient()
        inputs.calls.expose()
        return DryRun(None, ())


def _survey(
    step: Step,
    microbatch: Any,
    loss_of: Callable[[Any], Tensor | None] | None,
    inputs: DryRunInput,
    *,
    computes: bool,
) -> DryRun:
    """Dry run of ``step``, repeated until it finds no more exposed attributes."""
    module, units, calls = inputs.module, inputs.units, inputs.calls
    exposed, before, device = calls.exposed, calls.runtime, inputs.device
    inside = {id(part) for unit in units for part in unit.module.modules()}
    exposed.around = reached_by_hooks([part for unit in units for part in unit.module.modules()])
    exposed.above = {name: part for name, part in module.named_modules() if id(part) not in inside}
    stage = Stage(
        number=0 if computes else -1,
        stage_of={unit.name: 0 for unit in units},
        num_stages=1,
        shape_inference=inputs.shape_inference,
        transport=None,
        device=device,
        exposed=exposed,
        glue=list(exposed.above.values()),
        replicas=inputs.replicas,
    )
    uses = GlueUses(units, lambda: runtime.current.running_unit, exposed, inputs.lacking)
    log = CallLog(device.type)
    inputs.shape_inference.memoized.look()
    private = MicrobatchState(list(exposed.above.values()), [unit.module for unit in units], known=calls.known_places)

    def note_call(_: int, callee: Callee, args: Any, kwargs: Any) -> None:
        log.note(callee, args, kwargs)
        private.look()

    runtime = calls.runtime = Runtime(stage, private, note_values=uses.note, note_call=note_call)
    try:
        while True:
            exposed.next_round()
            log.calls.clear()
            copied = copy.deepcopy(microbatch)
            watch = _watch(inputs, copied, computes=computes)
            try:
                with undone(step, inputs, computes=computes), uses:
                    with private.learning(step):
                        trace = survey(runtime, step, copied, loss_of, watch)
                    calls_made = tuple(log.calls)
                    if inputs.num_microbatches > 1 and not computes and not exposed.has_news:
                        _try_another(runtime, private, step, copy.deepcopy(microbatch), loss_of)
            except Exception:
                if not exposed.has_news:
                    raise
            if not exposed.has_news:
                found = watch or _watch_more(runtime, private, step, loss_of, inputs)
                comparison = "" if found is None else found.comparison
                return DryRun(trace, tuple(uses.found.values()), calls_made, comparison)
            calls.expose()
    finally:
        exposed.let_go()
        runtime.close()
        calls.runtime = before


def _watch(inputs: DryRunInput, copied: Any, *, computes: bool) -> SampleWatch | None:
    """What watches a dry run of the first microbatch, ``copied``; nothing if it has few samples and more can run."""
    if inputs.batch is None or (inputs.batch[1][0] < SampleWatch.LEAST_SAMPLES and not computes):
        return None
    return SampleWatch(BatchRecord(*inputs.batch, copied))


def _watch_more(
    runtime: Runtime,
    private: MicrobatchState,
    step: Step,
    loss_of: Callable[[Any], Tensor | None] | None,
    inputs: DryRunInput,
) -> SampleWatch | None:
    """Dry run of several microbatches as one, for microbatches with few samples; ``None``: the step does not run so."""
    if inputs.batch is None:
        return None
    several, number = joined(*inputs.batch, SampleWatch.LEAST_SAMPLES)
    copied = copy.deepcopy(several)
    watch = SampleWatch(BatchRecord([several, several], (number, number), copied))
    with suppress(Exception), undone(step, inputs, computes=False), private.learning(step):
        survey(runtime, step, copied, loss_of, watch)
        return watch
    return None


def _try_another(
    runtime: Runtime,
    private: MicrobatchState,
    step: Step,
    microbatch: Any,
    loss_of: Callable[[Any], Tensor | None] | None,
) -> None:
    """Dry run of the next microbatch, which finds the state that the first one has left.

    If microbatches take turns, one may begin before an earlier one has left a value that it would find in a single
    process (a running sum, say), and nothing else would detect that.

    Raises:
        UnsupportedError: it uses a tensor of the first one.
    """
    with refuse_kept(), suppress(ValueNeededError), private.learning(step):
        survey(runtime, step, microbatch, loss_of)


def rescaled_tables(units: Sequence[Unit]) -> Iterator[Tensor]:
    """Embedding weights that their own layers change in forward: they rescale the rows in use (``max_norm``)."""
    inside = [part for unit in units for part in unit.module.modules()]
    tables = [part for part in inside if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    yield from (table.weight for table in tables if table.max_norm is not None)


@contextmanager
def undone(step: Step, inputs: DryRunInput, *, computes: bool) -> Iterator[None]:
    """Context in which ``step`` leaves no trace: it draws from random streams of its own, and its changes are undone.

    Raises:
        UnsupportedError: the glue changes parameters of units in place.
    """
    module = inputs.module
    with (
        seeded(0, inputs.device),
        _untouched(inputs, computes),
        variables_restored(module.modules(), step),
    ):
        yield


@contextmanager
def _untouched(inputs: DryRunInput, computes: bool) -> Iterator[None]:
    """Undo the step's changes to the module and to containers in context variables, and suppress its output.

    The changes are those of buffers, attributes, and lists and dicts in attributes.

    Raises:
        UnsupportedError: the glue changes parameters of units in place.
    """
    module, units, calls = inputs.module, inputs.units, inputs.calls
    written = WrittenWeights(
        module.parameters(), calls.written_weights, lambda: calls.runtime is not None and calls.runtime.is_in_unit
    )
    rescaled = {id(table): (table, table.detach().clone()) for table in rescaled_tables(units) if computes}
    placed = {id(parameter): parameter for unit in units for parameter in unit.module.parameters()}
    versions = {key: parameter._version for key, parameter in placed.items()}
    # Buffers of other stages, if the module is partitioned already, cannot change here.
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
        written,
    ):
        try:
            yield
        finally:
            for parameter, requires_grad in switches:
                parameter.requires_grad_(requires_grad)
            with torch.no_grad():
                for buffer, version, value in buffers:
                    # Replicas synchronise buffers whose version has increased, so an unchanged one keeps its version.
                    # Some kernels change a buffer without increasing it, and inference tensors have no version.
                    if computes or version is None or version != _version(buffer):
                        buffer.copy_(value)
                for table, value in rescaled.values():
                    table.copy_(value)
    changed = {key for key, parameter in placed.items() if parameter._version != versions[key]} - rescaled.keys()
    # Code above the units runs on every stage, which then has these weights. Trained ones may be in shards.
    groups = [group for optimizer in inputs.optimizers for group in optimizer.param_groups]
    trained = {id(each) for group in groups for each in group["params"]} or set(placed)
    changed -= {key for key, parameter in written.kept.items() if not (parameter.requires_grad and key in trained)}
    calls.written_lately = written.kept
    names = [name for name, parameter in module.named_parameters() if id(parameter) in changed]
    if names:
        raise trained_weights_written(names)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
