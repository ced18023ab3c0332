"""Measured costs, combined with modelled ones on one scale.

Measured units have their measured times. Everything else (code above the units, a unit that cannot run alone) has its
modelled time, multiplied by the ratio of measured to modelled time of the kernels of measured units.
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
    """Results of measurements; the same on every rank."""

    work: Mapping[str, Work]
    """Seconds of one call, by unit."""
    saved_bytes: Mapping[str, int]
    """Bytes that autograd saves in one call, by unit."""
    scale: float = 1.0
    """Ratio of measured to modelled seconds of kernels: the median over kinds of units."""
    split_overhead: float = 0.0
    """Relative slowdown of backwards that are split into two parts."""
    spread: float = 0.0
    """Standard deviation of the time of a call, relative to that time."""
    rank_of: Mapping[str, int]
    """Rank that has measured the unit, or one like it."""
    rank_speeds: tuple[float, ...] = ()
    """Speed of each rank, relative to the fastest; empty: all are alike, or none was measured."""
    notes: tuple[str, ...] = ()
    """Things that were not measured, with reasons."""


def work_of(events: Sequence[Event], machine: Machine, measured: Measured | None = None) -> dict[int, Work]:
    """Seconds of each event, by its position.

    Args:
        events: Events of one microbatch.
        machine: Model for everything that was not measured.
        measured: Measured costs, if there are some.
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
    """``trace`` with the measured saved bytes of units."""
    if measured is None or not measured.saved_bytes:
        return trace
    known = measured.saved_bytes
    events = [
        event._replace(saved_bytes=known[event.name]) if event.kind == "unit" and event.name in known else event
        for event in trace.events
    ]
    return replace(trace, events=events)
