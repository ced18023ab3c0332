"""Cost model of a step: times and bytes of units, measured if the options ask for it, modelled otherwise.

The costs combine the work of calls, measured times of units, and speeds of ranks. They are the same on all ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

import torch

from smp_strategy.activations.policy import ActivationPolicies
from smp_strategy.config.config import SMPConfig
from smp_strategy.config.sizes import show_count
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.device_model import Machine, Measured, with_measured_bytes, work_of
from smp_strategy.model.trace.events import Event, Trace
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.activation_budget.allocate import ActivationPlan, Microbatch
from smp_strategy.planning.profiling.profiler import MeasuringOptions, measure
from smp_strategy.planning.profiling.recorded_calls import RecordedCall
from smp_strategy.planning.schedule.flow import Flow
from smp_strategy.planning.schedule.simulate import SPLIT_OVERHEAD

__all__ = ["Costs", "find_costs", "measuring_device"]


@final
@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds and bytes of the events of a step."""

    machine: Machine
    """Performance model for events that were not measured."""
    measured: Measured | None = None
    stage_speeds: tuple[float, ...] = ()
    """Relative speeds; empty: all stages are equally fast."""
    relief: ActivationPlan | None = None
    """Recomputation and offload of activations; ``None``: units keep everything."""

    @property
    def split_overhead(self) -> float:
        """Overhead of a backward in two parts, as a share of the whole backward."""
        return SPLIT_OVERHEAD if self.measured is None or not self.measured.work else self.measured.split_overhead

    @property
    def spread(self) -> float:
        """Standard deviation of the time of a call, as a share of it; 0 without measurement."""
        return 0.0 if self.measured is None else self.measured.spread

    @classmethod
    def modelled(cls, device: torch.device) -> Self:
        """Costs without any measurement."""
        return cls(machine=Machine.nearest(device.type))

    def work(self, events: Sequence[Event]) -> dict[int, Work]:
        """Seconds of each event on a stage of speed 1, by position."""
        return work_of(events, self.machine, self.measured)

    def flow(
        self,
        trace: Trace,
        stage_of: Mapping[str, int],
        num_stages: int,
        activation_policies: ActivationPolicies | None = None,
    ) -> Flow:
        """Segment graph of ``trace`` on these stages, at their speeds, under ``activation_policies``."""
        relief = self.relief or ActivationPlan(machine=self.machine)
        microbatch = Microbatch(
            trace=self.with_bytes(trace),
            work=self.work(trace.events),
            stage_of=stage_of,
            num_stages=num_stages,
            speeds=self.stage_speeds,
        )
        return relief.flow(microbatch, activation_policies or {})

    def with_bytes(self, trace: Trace) -> Trace:
        """``trace`` with measured bytes of activations, if there are any."""
        return with_measured_bytes(trace, self.measured)

    def render(self) -> str:
        """Lines about the measurement for the user; empty without one."""
        if self.measured is None:
            return ""
        measured = self.measured
        found = {"times": measured.work, "activations": measured.saved_bytes}
        what = " and ".join(name for name, of_units in found.items() if of_units) or "nothing"
        units = show_count(len(measured.rank_of), "unit")
        ranks = show_count(len(set(measured.rank_of.values())), "rank")
        lines = [f"Measured: {what} of {units}, on {ranks}."]
        if measured.rank_speeds:
            speeds = ", ".join(f"stage {stage} {speed:.2f}" for stage, speed in enumerate(self.stage_speeds))
            lines.append(f"Relative speeds: {speeds}.")
        return "\n".join([*lines, *measured.notes])


def find_costs(
    config: SMPConfig,
    device: torch.device,
    calls: Sequence[RecordedCall],
    trace: Trace | None,
    shape: MeshShape,
    machine: Machine | None = None,
) -> Costs:
    """Costs of a step; collective over all ranks if something is measured.

    Args:
        config: All options, which name the measurements.
        device: Device of the step.
        calls: Calls of units, as recorded by a dry run.
        trace: Trace of the same dry run.
        shape: Shape of the mesh.
        machine: Performance model for everything else; ``None``: a nominal one for the kind of device.
    """
    speeds = () if config.stage_speeds is None else config.speeds(shape.pp)
    if trace is None or not (config.trace_execution_times or config.trace_memory_usage):
        return Costs(machine=machine or Machine.nearest(device.type), stage_speeds=speeds)
    where = measuring_device(config, device)
    options = MeasuringOptions(
        device=where,
        times=config.trace_execution_times,
        memory=config.trace_memory_usage,
        compares_ranks=config.stage_speeds is None,
        num_replicas=shape.dp,
    )
    machine = machine or Machine.nearest(where.type)
    measured = measure(calls, trace.events, machine, options)
    return Costs(
        machine=machine,
        measured=measured,
        stage_speeds=speeds or _by_stage(measured.rank_speeds, shape),
    )


def measuring_device(config: SMPConfig, device: torch.device) -> torch.device:
    """Device on which units for ``device`` are measured.

    Raises:
        ConfigError: the options ask for a device that this rank does not have.
    """
    if config.trace_device is None:
        return device
    if config.trace_device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "`trace_device=gpu` asks for measurements on a GPU, but this rank has none. Leave the option out to "
            f"measure where the step runs ({device.type})."
        )
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _by_stage(rank_speeds: Sequence[float], shape: MeshShape) -> tuple[float, ...]:
    """Speed of each stage, that of its slowest rank: replicas wait for each other."""
    if not rank_speeds:
        return ()
    slowest = [1.0] * shape.pp
    for rank, speed in enumerate(rank_speeds):
        stage = shape.pp - 1 - shape.coordinates(rank)["pp"]
        slowest[stage] = min(slowest[stage], speed)
    return tuple(slowest)
