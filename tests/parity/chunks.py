"""Layouts and plans by hand: several chunks of units per stage, and backwards that are split.

The engine decides as ever; what it decides is replaced here, the partition by one with chunks, the plan by one whose
backwards are in two parts, the later of which come as late as wanted.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import smp_strategy.engine.parallelize
from smp_strategy.engine.plan_cache import PlanCache
from smp_strategy.model.trace.events import Trace
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.planning.partition.partition import Partition

from .compare import Case, Outcome, pipeline

__all__ = ["NEVER", "chunked", "in_chunks", "laid_out", "split_plan", "stages_of_chunks"]

NEVER = 1 << 30
"""A delay: weights' gradients come when all else is done."""


def stages_of_chunks(pp: int, per_stage: int, placement: str) -> list[int]:
    """The stage of each chunk: round and round (``loop``), or from the last stage down and up again (``v``)."""
    if placement == "loop":
        return [chunk % pp for chunk in range(pp * per_stage)]
    assert per_stage == 2
    return [*reversed(range(pp)), *range(pp)]


def in_chunks(partition: Partition, stages: list[int]) -> Partition:
    """``partition`` with its units, in their order, dealt out evenly to chunks on these ``stages``."""
    num = len(partition.units)
    assert num >= len(stages), f"{num} units are too few for {len(stages)} chunks"
    starts = [round(chunk * num / len(stages)) for chunk in range(len(stages) + 1)]
    units = [
        replace(unit, stage=stage)
        for stage, (begin, end) in zip(stages, pairwise(starts), strict=True)
        for unit in partition.units[begin:end]
    ]
    return replace(partition, units=tuple(units))


def split_plan(plan: Plan, delay: int, segments: Callable[[int], bool] = lambda segment: True) -> Plan:
    """``plan`` with each backward in two parts, the second ``delay`` actions after the first, or at the end.

    Args:
        plan: with whole backwards.
        delay: how far behind.
        segments: whose backwards are split.
    """
    return Plan(tuple(tuple(_split(actions, delay, segments)) for actions in plan.stages), plan.times)


def _split(actions: Iterable[Action], delay: int, segments: Callable[[int], bool]) -> Iterable[Action]:
    waiting: list[tuple[int, Action]] = []
    for position, action in enumerate(actions):
        while waiting and waiting[0][0] <= position:
            yield waiting.pop(0)[1]
        if action.kind == "B" and segments(action.segment):
            yield replace(action, kind="I")
            waiting.append((position + 1 + delay, replace(action, kind="W")))
        else:
            yield action
    yield from (action for _, action in waiting)


def chunked(
    case: Case, pp: int, counts: tuple[int, ...], stages: list[int], delay: int | None, every: int = 1
) -> list[Outcome]:
    """On a rank: :func:`~.compare.pipeline` with chunks on these ``stages``, and backwards split if there is a delay.

    Args:
        case, pp, counts: as there.
        stages: of the chunks.
        delay: see :func:`split_plan`; ``None``: whole backwards.
        every: split those of every so many segments.
    """
    with laid_out(stages, delay, every):
        return pipeline(case, pp, counts)


@contextmanager
def laid_out(stages: list[int], delay: int | None, every: int = 1) -> Iterator[None]:
    """While this is open, ranks decide so."""
    decide, plan_of = smp_strategy.engine.parallelize.decide, PlanCache.plan

    def decide_chunks(*args: Any, **kwargs: Any) -> Any:
        partition, *found = decide(*args, **kwargs)
        return in_chunks(partition, stages), *found

    def split(timetables: PlanCache, trace: Trace, num_microbatches: int) -> Plan:
        plan = plan_of(timetables, trace, num_microbatches)
        return plan if delay is None else split_plan(plan, delay, lambda segment: segment % every == 0)

    with (
        mock.patch.object(smp_strategy.engine.parallelize, "decide", decide_chunks),
        mock.patch.object(PlanCache, "plan", split),
    ):
        yield
