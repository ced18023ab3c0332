"""Distributed profiler: every distinct unit call is timed once, on one rank, and all ranks share the results.

Calls are of the same kind if units that are built alike get arguments that are alike and run as many operations.
Ranks exchange the kinds of calls they have met (replicas may have batches of other shapes). Each kind that rank 0 has
met is measured by the rank with the least load among those that have met it, by modelled cost. The results are
exchanged. Every rank also times one common call to compare the speeds of ranks; times are given for the fastest rank.

Microbenchmark of a single unit call: time of forward and backward, and bytes that autograd saves.

The unit computes with copies of its parameters and buffers, so it may be on the meta device (copies get random values
then), and never changes the originals. Random streams, attributes, and containers that its hooks reach are restored.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.device import is_host, wait_for_all
from smp_strategy.model.rng import seeded
from smp_strategy.model.trace.device_model import Machine, Measured, modelled_work
from smp_strategy.model.trace.events import Event
from smp_strategy.model.trace.fake_call import call as call_with
from smp_strategy.model.trace.fake_call import imitate, stand_in, tensors_of
from smp_strategy.model.trace.places import reached_by_hooks
from smp_strategy.model.trace.pytree import flatten_result, unflatten_call
from smp_strategy.model.trace.saved_tensors import counting_saved
from smp_strategy.model.trace.snapshot import Snapshot
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.model.trace.work import Work
from smp_strategy.pipeline.dist_calls.user_collectives import ReplicaCollectives, Replicas
from smp_strategy.pipeline.segments import Import, enter
from smp_strategy.pipeline.split_backward import Deferred, backward_of_imports
from smp_strategy.planning.profiling.recorded_calls import RecordedCall

__all__ = ["MeasuringOptions", "assign", "measure", "relative_speeds", "Sample", "measure_alone"]


WARM_UPS = 2
FEWEST_REPEATS, MOST_REPEATS = 10, 25
# Repeats beyond the fewest stop after this time.
ENOUGH_SECONDS = 0.25
# Standard deviation over median absolute deviation of a normal distribution.
NORMAL = 1.4826


class Sample(NamedTuple):
    """Measured costs of a call."""

    work: Work
    """Medians; zeros if times are not measured."""
    saved_bytes: int
    split_seconds: float = 0.0
    """Overhead of its backward in two parts."""
    spread_seconds: float = 0.0
    """Standard deviation of its time, estimated from the median absolute deviation."""


def measure_alone(
    call: RecordedCall, device: torch.device, *, times: bool, memory: bool, num_replicas: int = 1
) -> Sample:
    """Run ``call`` alone on ``device``.

    Args:
        call: Recorded call of a unit.
        device: Device of the measurement.
        times: Whether to repeat the call and time it.
        memory: Whether to count the bytes that autograd saves.
        num_replicas: Size of the group that its collectives expect; they exchange nothing here.
    """
    module = call.callee.module
    assert module is not None
    alone = ReplicaCollectives(Replicas(size=num_replicas), meets=False)
    with (
        closing(alone),
        _untouched(module),
        seeded(0, device),
        torch.inference_mode(False),
        alone.open(),
    ):
        dtypes = call.callee.dtype_of_weights()
        weights = {name: _copy(tensor, device, dtypes.get(name)) for name, tensor in tensors_of(module).items()}
        saved = _saved_bytes(call, weights, device) if memory else 0
        if not times:
            return Sample(Work(), saved)
        return _times(call, weights, device)._replace(saved_bytes=saved)


def _times(call: RecordedCall, weights: Mapping[str, Tensor], device: torch.device) -> Sample:
    """Times of repeated calls, without saved bytes."""
    for _ in range(WARM_UPS):
        _turn(call, weights, device)
    found: list[tuple[float, ...]] = []
    begin = time.perf_counter()
    while len(found) < FEWEST_REPEATS or (len(found) < MOST_REPEATS and time.perf_counter() - begin < ENOUGH_SECONDS):
        found.append(_turn(call, weights, device))
    forward, whole, first, later = map(statistics.median, zip(*found, strict=True))
    totals = [forward + whole for forward, whole, *_ in found]
    usual = statistics.median(totals)
    spread = NORMAL * statistics.median([abs(total - usual) for total in totals])
    if not first:
        return Sample(Work(forward, 0.0, whole), 0, 0.0, spread)
    # Paired differences within a turn: a machine that is slower for a while is so for both runs.
    longer = statistics.median([first + later - whole for _, whole, first, later in found])
    later = min(later, whole)
    return Sample(Work(forward, whole - later, later), 0, max(longer, 0.0) if later else 0.0, spread)


def _turn(call: RecordedCall, weights: Mapping[str, Tensor], device: torch.device) -> tuple[float, float, float, float]:
    """Seconds of forward, of the whole backward, and of its two parts; a missing part takes 0.

    The whole backward runs between the two parts, as other passes do in a schedule: right after the first part, the
    second would find its data in the cache and seem cheaper than it is.
    """
    _, first, deferred = _time_once(call, weights, device, splits=True)
    forward, whole, _ = _time_once(call, weights, device, splits=False)
    return forward, whole, first, _timed(deferred.run, device)[0] if deferred else 0.0


def _time_once(
    call: RecordedCall, weights: Mapping[str, Tensor], device: torch.device, *, splits: bool
) -> tuple[float, float, Deferred]:
    """Seconds of forward, and of backward: the whole, or its first part together with the deferred second part."""
    imports: list[Import] = []
    inputs = [_entered(_real(leaf, device), imports) for leaf in call.leaves]
    forward, result = _timed(lambda: _run(call, weights, inputs, device), device)
    results = [leaf for leaf in flatten_result(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not results:
        return forward, 0.0, Deferred()
    gradients = [torch.ones_like(tensor) for tensor in results]
    if not splits:
        whole, _ = _timed(lambda: torch.autograd.backward(results, gradients), device)
        return forward, whole, Deferred()
    first, deferred = _timed(lambda: backward_of_imports(results, gradients, set(imports)), device)
    return forward, first if imports else 0.0, deferred


def _entered(leaf: Any, imports: list[Import]) -> Any:
    """Argument as if received from another stage."""
    if not (isinstance(leaf, Tensor) and leaf.requires_grad):
        return leaf
    imports.append(Import(-1, None))
    return enter(leaf, imports[-1])


def _saved_bytes(call: RecordedCall, weights: Mapping[str, Tensor], device: torch.device) -> int:
    inputs = [_real(leaf, device) for leaf in call.leaves]
    if is_host(device):
        with counting_saved(weights.values()) as saved_bytes:
            _run(call, weights, inputs, device)
        return saved_bytes()
    before = torch.accelerator.memory_allocated(device)
    result = _run(call, weights, inputs, device)
    kept = torch.accelerator.memory_allocated(device) - before
    del result
    return kept


def _run(call: RecordedCall, weights: Mapping[str, Tensor], inputs: Sequence[Any], device: torch.device) -> Any:
    args, kwargs = unflatten_call(inputs, call.structure)
    # New modes for each run: autocast caches casts of weights, with their graph, as long as it lasts.
    with call.modes.entered(device.type):
        return call_with(call.callee, dict(weights), args, kwargs)


def _timed(action: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    wait_for_all(device)
    begin = time.perf_counter()
    result = action()
    wait_for_all(device)
    return time.perf_counter() - begin, result


# Tensors


def _copy(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Leaf tensor with the values of ``tensor``, or random ones, in the dtype that the unit computes with."""
    if tensor.is_meta:
        spec = replace(TensorSpec.of(tensor), requires_grad=False, dtype=dtype or tensor.dtype)
        return _made(spec, device).requires_grad_(tensor.requires_grad)
    return tensor.detach().to(device, dtype, copy=True).requires_grad_(tensor.requires_grad)


def _real(leaf: Any, device: torch.device) -> Any:
    """Argument with values instead of metadata."""
    if isinstance(leaf, Tensor):
        return leaf.detach().to(device, copy=True)
    return stand_in(leaf, lambda spec: _made(spec, device))


def _made(spec: TensorSpec, device: torch.device) -> Tensor:
    """Tensor like ``spec``: random for floating point, zeros for integers, ``True`` for booleans."""
    made = imitate(replace(spec, device=device))
    # Fill the whole storage: the tensor may be a view that overlaps itself.
    memory = torch.empty(0, dtype=spec.dtype, device=device).set_(made.untyped_storage())
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        memory.normal_()
    else:
        memory.fill_(spec.dtype is torch.bool)
    return made


def _untouched(module: nn.Module) -> Snapshot:
    parts = list(module.modules())
    return Snapshot(modules=parts, containers=reached_by_hooks(parts))


# Ranks that differ by less count as equally fast: clocks and other processes cause as much.
SAME_SPEED = 0.1
# No machine differs that much from a nominal one: such a unit spends its time outside of its kernels (it waits, or
# computes in Python), and says nothing about the kernels of others.
MOST_SCALE = 30.0


@final
@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """Options of a measurement."""

    device: torch.device
    times: bool = True
    memory: bool = True
    compares_ranks: bool = True
    """Whether the speeds of ranks are compared."""
    num_replicas: int = 1
    """Number of replicas, for collectives in calls."""


class _Met(NamedTuple):
    """Kinds of calls that a rank has met."""

    cost: dict[str, float]
    """Modelled seconds of each kind that can be measured."""
    kinds: dict[str, list[str]]
    """Kinds of the calls of each unit."""
    obstacles: dict[str, str]
    """Reason per kind that cannot be measured."""


def measure(
    calls: Sequence[RecordedCall], events: Sequence[Event], machine: Machine, options: MeasuringOptions
) -> Measured:
    """Measure the kinds of calls that rank 0 has met; collective over all ranks, if there are several.

    Args:
        calls: Calls of units, as recorded by a dry run.
        events: Events of the same dry run.
        machine: Performance model for everything else.
        options: Quantities to measure, and the device.
    """
    rank, _ = _place()
    by_kind, mine = _describe(calls, events, machine)
    met = _gathered(mine)
    plan = assign([each.cost for each in met])
    samples, failures = dict[str, Sample](), dict[str, str]()
    common = next((kind for kind in plan if all(kind in each.cost for each in met)), None)
    speeds: tuple[float, ...] = ()
    if common is not None and options.times and options.compares_ranks and len(met) > 1:
        speeds = relative_speeds(_gathered(_speed(by_kind[common], options)))
    for kind in (kind for kind, owner in plan.items() if owner == rank):
        try:
            samples[kind] = _measured(by_kind[kind], options)
        except Exception as error:  # user code that runs outside of its model may raise anything
            failures[kind] = f"{type(error).__name__}: {error}".splitlines()[0]
    found = _gathered((samples, failures))
    all_samples = {
        kind: _at_full_speed(sample, speeds[owner] if speeds else 1.0)
        for owner, (theirs, _) in enumerate(found)
        for kind, sample in theirs.items()
    }
    reasons = {**met[0].obstacles, **{kind: why for _, theirs in found for kind, why in theirs.items()}}
    return _assembled(met[0], all_samples, reasons, plan, speeds, options)


def assign(costs: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Rank that measures each kind of rank 0: greedy load balancing, the most expensive kind first."""
    load = [0.0] * len(costs)
    owner: dict[str, int] = {}
    for kind in sorted(costs[0], key=lambda kind: (-costs[0][kind], kind)):
        able = [rank for rank, theirs in enumerate(costs) if kind in theirs]
        owner[kind] = min(able, key=load.__getitem__)
        load[owner[kind]] += costs[0][kind]
    return owner


def _describe(
    calls: Sequence[RecordedCall], events: Sequence[Event], machine: Machine
) -> tuple[dict[str, RecordedCall], _Met]:
    """One call of each kind, and this rank's summary of all kinds."""
    work = modelled_work(events, machine)
    runs: dict[str, list[int]] = {}
    for position, event in enumerate(events):
        if event.kind == "unit":
            runs.setdefault(event.name, []).append(position)
    met = _Met({}, {}, {})
    by_kind: dict[str, RecordedCall] = {}
    for call in calls:
        of_unit = met.kinds.setdefault(call.unit, [])
        # A call that ended the dry run has no event.
        run = next(iter(runs.get(call.unit, ())[len(of_unit) :]), None)
        kind = f"{call.kind} {None if run is None else events[run].effort}"
        of_unit.append(kind)
        by_kind.setdefault(kind, call)
        if call.obstacle:
            met.obstacles[kind] = call.obstacle
        elif run is not None:
            met.cost[kind] = sum(work[run])
    return by_kind, met


def _assembled(
    met: _Met,
    samples: Mapping[str, Sample],
    reasons: Mapping[str, str],
    plan: Mapping[str, int],
    rank_speeds: tuple[float, ...],
    options: MeasuringOptions,
) -> Measured:
    work: dict[str, Work] = {}
    saved: dict[str, int] = {}
    rank_of: dict[str, int] = {}
    notes: list[str] = []
    split_seconds = spread_seconds = 0.0
    for unit, kinds in met.kinds.items():
        missing = [kind for kind in kinds if kind not in samples]
        if missing:
            notes.append(f"`{unit}` is not measured but modelled: {reasons.get(missing[0], 'it ran otherwise')}.")
            continue
        of_unit = [samples[kind] for kind in kinds]
        rank_of[unit] = plan[kinds[0]]
        if options.times:
            split_seconds += statistics.fmean(sample.split_seconds for sample in of_unit)
            spread_seconds += statistics.fmean(sample.spread_seconds for sample in of_unit)
            work[unit] = Work(*map(statistics.fmean, zip(*(sample.work for sample in of_unit), strict=True)))
        if options.memory:
            saved[unit] = round(statistics.fmean(sample.saved_bytes for sample in of_unit))
    ratios = [sum(sample.work) / met.cost[kind] for kind, sample in samples.items() if met.cost[kind]]
    return Measured(
        work=work,
        saved_bytes=saved,
        scale=_scale(ratios) if options.times else 1.0,
        rank_of=rank_of,
        split_overhead=split_seconds / (sum(each.backward for each in work.values()) or 1.0),
        spread=spread_seconds / (sum(map(sum, work.values())) or 1.0),
        rank_speeds=rank_speeds,
        notes=tuple(notes),
    )


def _scale(ratios: Sequence[float]) -> float:
    """Median of measured over modelled seconds of kernels."""
    of_kernels = [ratio for ratio in ratios if 1 / MOST_SCALE <= ratio <= MOST_SCALE]
    return statistics.median(of_kernels) if of_kernels else 1.0


def _measured(call: RecordedCall, options: MeasuringOptions) -> Sample:
    return measure_alone(
        call, options.device, times=options.times, memory=options.memory, num_replicas=options.num_replicas
    )


def _speed(call: RecordedCall, options: MeasuringOptions) -> float:
    """Calls per second; 0 if the call fails."""
    try:
        sample = _measured(call, replace(options, memory=False))
    except Exception:
        return 0.0  # the rank that measures this kind reports the reason
    return 1.0 / max(sum(sample.work), 1e-9)


def relative_speeds(speeds: Sequence[float]) -> tuple[float, ...]:
    """Speed of each rank relative to the fastest; empty if ranks are alike or one speed is unknown (0)."""
    fastest, slowest = max(speeds), min(speeds)
    if slowest <= 0 or slowest >= (1 - SAME_SPEED) * fastest:
        return ()
    return tuple(speed / fastest for speed in speeds)


def _at_full_speed(sample: Sample, speed: float) -> Sample:
    return sample._replace(
        work=sample.work.scaled(speed),
        split_seconds=speed * sample.split_seconds,
        spread_seconds=speed * sample.spread_seconds,
    )


def _place() -> tuple[int, int]:
    """Rank and world size; planning works without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _gathered(mine: Any) -> list[Any]:
    """``mine`` of every rank, by rank."""
    _, world_size = _place()
    if world_size == 1:
        return [mine]
    return collectives.gather_objects(mine, "what calls cost on other ranks")
