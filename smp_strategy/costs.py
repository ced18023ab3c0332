"""What a step costs where it will run: measured if the options ask for that, modelled otherwise.

Here the options meet what counts and what measures: kernels of calls, bytes of optimizers, times of units, speeds of
ranks. Everything is the same on all ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from smp_strategy.config import SMPConfig
from smp_strategy.errors import ConfigError
from smp_strategy.measurement.calls import UnitCall
from smp_strategy.measurement.sharing import MeasuringOptions, measure
from smp_strategy.mesh import MeshShape
from smp_strategy.optim.state_size import MOMENTS_IF_UNKNOWN, optimizer_state_bytes
from smp_strategy.partition.costs import Held
from smp_strategy.trace.events import Event, Trace
from smp_strategy.trace.machine import Machine
from smp_strategy.trace.measured import Measured, with_measured_bytes, work_of
from smp_strategy.trace.work import Work
from smp_strategy.units import Unit

__all__ = ["Costs", "find_costs", "held_by_units", "measuring_device"]


@final
@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds and bytes of the events of a step."""

    machine: Machine
    """Models what was not measured."""
    measured: Measured | None = None
    stage_speeds: tuple[float, ...] = ()
    """Relative; empty: all stages are alike."""

    def work(self, events: Sequence[Event]) -> dict[int, Work]:
        """What each event takes on a stage of speed 1, by position."""
        return work_of(events, self.machine, self.measured)

    def with_bytes(self, trace: Trace) -> Trace:
        """``trace`` with the bytes that units were seen to keep, if that was measured."""
        return with_measured_bytes(trace, self.measured)

    def render(self) -> str:
        """What the user is told about the measurement; empty without one."""
        if self.measured is None:
            return ""
        ranks = len(set(self.measured.rank_of.values()))
        what = [name for name, found in (("times", self.measured.work), ("activations", self.measured.saved_bytes)) if found]
        lines = [f"Measured {' and '.join(what) or 'nothing'} of {len(self.measured.rank_of)} units on {ranks} ranks."]
        if self.stage_speeds:
            speeds = ", ".join(f"stage {stage} {speed:.2f}" for stage, speed in enumerate(self.stage_speeds))
            lines.append(f"Relative speeds: {speeds}.")
        return "\n".join([*lines, *self.measured.notes])


def find_costs(
    config: SMPConfig, device: torch.device, calls: Sequence[UnitCall], trace: Trace | None, shape: MeshShape
) -> Costs:
    """The costs of a step; collective over all ranks where something is measured.

    Args:
        config: says what is measured.
        device: where the step will run.
        calls: of units, as a dry run has met them.
        trace: of the same dry run.
        shape: which rank is which stage.
    """
    speeds = () if config.stage_speeds is None else config.speeds(shape.pp)
    if trace is None or not (config.trace_execution_times or config.trace_memory_usage):
        return Costs(machine=Machine.nominal(device.type), stage_speeds=speeds)
    where = measuring_device(config, device)
    options = MeasuringOptions(
        device=where,
        times=config.trace_execution_times,
        memory=config.trace_memory_usage,
        compares_ranks=config.stage_speeds is None,
    )
    machine = Machine.nominal(where.type)
    measured = measure(calls, trace.events, machine, options)
    return Costs(machine=machine, measured=measured, stage_speeds=speeds or _by_stage(measured.rank_speeds, shape))


def measuring_device(config: SMPConfig, device: torch.device) -> torch.device:
    """Where units are measured that will run on ``device``.

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
    """A stage is as fast as the slowest of its ranks: replicas wait for each other."""
    if not rank_speeds:
        return ()
    slowest = [1.0] * shape.pp
    for rank, speed in enumerate(rank_speeds):
        stage = shape.pp - 1 - shape.coordinates(rank)["P"]
        slowest[stage] = min(slowest[stage], speed)
    return tuple(slowest)


def held_by_units(
    module: nn.Module, units: Iterable[Unit], optimizers: Sequence[Optimizer]
) -> dict[str, dict[int, Held]]:
    """What the parameters of each unit take while they are trained, by unit in order of registration.

    Without any optimizer it is not known what will train them, and two moments are assumed.
    """
    # Numbers that are the same on every rank tell which units share a parameter.
    numbers = {id(parameter): number for number, parameter in enumerate(module.parameters())}
    state = optimizer_state_bytes(optimizers)

    def held(parameter: nn.Parameter) -> Held:
        if not parameter.requires_grad:
            return Held(parameter.nbytes)
        kept = state.get(id(parameter), 0) if optimizers else MOMENTS_IF_UNKNOWN * parameter.nbytes
        return Held(parameter.nbytes, parameter.nbytes, kept)

    return {
        unit.name: {numbers[id(parameter)]: held(parameter) for parameter in unit.module.parameters()}
        for unit in units
    }
