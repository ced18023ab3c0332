"""Costs that were measured instead of modelled, and how both go together.

Where a unit was measured, that counts. Everything else (code above the units, a unit that cannot run alone) keeps its
modelled time, multiplied by how much longer the kernels of measured units took than modelled, so that all are on one
scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from smp_strategy.model.trace.device_model import Machine, modelled_work
from smp_strategy.model.trace.events import Event, Trace
from smp_strategy.model.trace.work import Work

__all__ = ["Measured", "with_measured_bytes", "work_of"]


@final
@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured; the same on every rank."""

    work: Mapping[str, Work]
    """Of one call, by unit."""
    saved_bytes: Mapping[str, int]
    """Bytes that autograd keeps of one call, by unit."""
    scale: float = 1.0
    """Measured over modelled seconds of kernels: the median over kinds of units."""
    split_overhead: float = 0.0
    """What backwards take longer in two parts, as a share of them."""
    spread: float = 0.0
    """The standard deviation of what a call takes, as a share of it."""
    rank_of: Mapping[str, int]
    """The rank that has measured the unit, or one like it."""
    rank_speeds: tuple[float, ...] = ()
    """How fast each rank is, relative to the fastest; empty: all are alike, or nobody asked."""
    notes: tuple[str, ...] = ()
    """What was not measured, and why."""


def work_of(events: Sequence[Event], machine: Machine, measured: Measured | None = None) -> dict[int, Work]:
    """What each event costs, by its position.

    Args:
        events: of one microbatch.
        machine: models what was not measured.
        measured: what was.
    """
    modelled = modelled_work(events, machine)
    if measured is None or not measured.work:
        return modelled
    return {
        position: measured.work[event.name]
        if event.kind == "unit" and event.name in measured.work
        else modelled[position].scaled(measured.scale)
        for position, event in enumerate(events)
    }


def with_measured_bytes(trace: Trace, measured: Measured | None) -> Trace:
    """``trace`` with the bytes that units were seen to keep."""
    if measured is None or not measured.saved_bytes:
        return trace
    known = measured.saved_bytes
    events = [
        event._replace(saved_bytes=known[event.name]) if event.kind == "unit" and event.name in known else event
        for event in trace.events
    ]
    return replace(trace, events=events)
