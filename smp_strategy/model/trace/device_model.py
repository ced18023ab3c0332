"""Roofline model of a device: seconds from FLOPs, bytes and kernel launches.

A matrix product is bound by arithmetic or by memory, whichever takes longer; every other kernel is bound by memory; and
each kernel has to be launched. The nominal figures are round ones of common hardware. They need not be those of the
machine at hand: the partition depends on ratios, and ``trace_execution_times`` measures seconds.

Measured costs, combined with modelled ones on one scale.

Measured units have their measured times. Everything else (code above the units, a unit that cannot run alone) has its
modelled time, multiplied by the ratio of measured to modelled time of the kernels of measured units.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, final

from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.events import Event, Trace
from smp_strategy.model.trace.work import Effort, Link, Work

__all__ = ["HostLink", "Machine", "modelled_work", "Measured", "with_measured_bytes", "work_of"]


class HostLink(NamedTuple):
    """Link from the device to host memory."""

    bytes_per_second: float
    """Bandwidth in each direction."""
    is_beside: bool
    """Whether copies overlap with computation."""


class Machine(NamedTuple):
    """A device and its links to the next one and to the host."""

    flops_per_second: float
    """Reached by products of large matrices."""
    bytes_per_second: float
    """Reached by memory-bound kernels."""
    call_seconds: float
    """Cost of a kernel launch."""
    link: Link
    """Link to the device of the next stage."""
    host: HostLink = HostLink(5e9, is_beside=False)
    """Link for offloaded activations."""

    @classmethod
    def nominal(cls, device_type: str) -> Self:
        """Nominal figures for a kind of device, ``cpu`` or ``cuda``.

        Raises:
            ConfigError: Another kind.
        """
        if device_type not in ("cpu", "cuda"):
            raise ConfigError(f"A nominal machine is `cpu` or `cuda`, but this is {device_type!r}.")
        if device_type == "cuda":
            # An A100: half of its 312 TFLOP/s in bfloat16 and three quarters of its 2 TB/s are what large kernels
            # reach; eager PyTorch starts one in about 5 us; NVLink 3 carries 300 GB/s each way, NCCL reaches 200.
            # PCIe 4 has 32 GB/s each way, of which pinned memory reaches 25.
            return cls(1.5e14, 1.5e12, 5e-6, Link(1e-5, 2e11), HostLink(2.5e10, is_beside=True))
        # One core of a server with AVX2 at 2.5 to 3 GHz (80 to 96 GFLOP/s in float32 at most) and its share of the
        # memory channels; PyTorch's dispatcher takes about 2 us; gloo through the loopback device.
        # A copy reads and writes, and nobody computes meanwhile.
        return cls(6e10, 1e10, 2e-6, Link(1e-4, 1e9), HostLink(5e9, is_beside=False))

    @classmethod
    def nearest(cls, device_type: str) -> Self:
        """Nominal figures for any kind of device: those of a GPU for all accelerators."""
        return cls.nominal("cpu" if device_type == "cpu" else "cuda")

    def seconds(self, effort: Effort) -> float:
        """Seconds that ``effort`` takes."""
        products = max(effort.flops / self.flops_per_second, effort.product_bytes / self.bytes_per_second)
        return products + effort.other_bytes / self.bytes_per_second + effort.kernels * self.call_seconds


def modelled_work(events: Sequence[Event], machine: Machine) -> dict[int, Work]:
    """Seconds of each event on ``machine``, by its position."""
    return {position: Work(*map(machine.seconds, event.effort)) for position, event in enumerate(events)}


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
