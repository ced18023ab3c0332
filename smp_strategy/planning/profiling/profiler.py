"""Distributed profiler: every distinct unit call is timed once, on one rank, and all ranks share the results.

Calls are of the same kind if units that are built alike get arguments that are alike and run as many operations.
Ranks exchange the kinds of calls they have met (replicas may have batches of other shapes). Each kind that rank 0 has
met is measured by the rank with the least load among those that have met it, by modelled cost. The results are
exchanged. Every rank also times one common call to compare the speeds of ranks; times are given for the fastest rank.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.model.trace.device_model import Machine, Measured, modelled_work
from smp_strategy.model.trace.events import Event
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.profiling.recorded_calls import RecordedCall
from smp_strategy.planning.profiling.unit_benchmark import Sample, measure_alone

__all__ = ["MeasuringOptions", "assign", "measure", "relative_speeds"]

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
    """Rank that measures each kind of rank 0: greedy load balancing, the most expensive kind first.

    Args:
        costs: Modelled costs by kind that a rank has met, for each rank.
    """
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
