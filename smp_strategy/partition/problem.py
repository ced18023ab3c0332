"""The partitioning problem, read off a trace: units in execution order with their costs.

A stage is a contiguous run of units. Its cost weighs memory against time as in SageMaker's library,
``C = a * M + (1 - a) * T`` with ``a`` the ``memory_weight``; M and T are shares of the model's total. Memory is that
of parameters, gradients, two optimizer moments and activations kept for backward. Time is modelled by a roofline:
FLOPs or bytes moved, whichever takes longer. A parameter that two units share counts once per stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from smp_strategy.trace.events import Event, Trace
from smp_strategy.trace.work import Work

__all__ = ["Problem", "UnitCost", "event_work", "problem_of"]

# Floating-point operations that a processor does in the time in which it moves one byte.
FLOPS_PER_BYTE = 8.0
# Parameter, gradient and two moments of an Adam-like optimizer.
STATES_PER_PARAMETER = 4


@final
@dataclass(frozen=True)
class UnitCost:
    """What one unit costs."""

    name: str
    parameters: Mapping[int, int]
    """Bytes of each of its parameters, by an identity that shared parameters have in common."""
    activation_bytes: int
    """Kept for the backward pass of one microbatch."""
    time: float
    """Forward time in FLOP equivalents."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all its parameters."""
        return sum(self.parameters.values())


@final
@dataclass(frozen=True)
class Problem:
    """Units in execution order; find ``num_stages`` contiguous runs."""

    units: Sequence[UnitCost]
    num_stages: int
    memory_weight: float
    cut_bytes: Sequence[int]
    """Bytes that cross a cut before unit i, per microbatch."""

    def stage_cost(self, begin: int, end: int) -> float:
        """Weighted share of units ``begin`` to ``end`` (exclusive) in the whole model."""
        memory = self.stage_memory(begin, end) / max(self._total_memory, 1)
        time = sum(unit.time for unit in self.units[begin:end]) / max(self._total_time, 1e-30)
        return self.memory_weight * memory + (1 - self.memory_weight) * time

    def stage_memory(self, begin: int, end: int) -> int:
        """Bytes of parameters, gradients, optimizer state and activations of one microbatch."""
        parameters: dict[int, int] = {}
        for unit in self.units[begin:end]:
            parameters.update(unit.parameters)
        activations = sum(unit.activation_bytes for unit in self.units[begin:end])
        return STATES_PER_PARAMETER * sum(parameters.values()) + activations

    @property
    def _total_memory(self) -> int:
        return self.stage_memory(0, len(self.units))

    @property
    def _total_time(self) -> float:
        return sum(unit.time for unit in self.units)


def event_work(events: Sequence[Event]) -> dict[int, Work]:
    """Modelled work of each event, by position, in FLOP equivalents.

    The gradients of inputs and of weights take as many products of matrices each as the forward pass.
    """
    times = [max(float(event.flops), FLOPS_PER_BYTE * event.traffic) for event in events]
    return {position: Work(time, time, time) for position, time in enumerate(times)}


def problem_of(
    trace: Trace,
    parameters: Mapping[str, Mapping[int, int]],
    *,
    num_stages: int,
    memory_weight: float,
) -> Problem:
    """The problem that a traced microbatch poses.

    Args:
        trace: events of one microbatch.
        parameters: bytes of each unit's parameters, by unit in order of registration.
        num_stages: number of stages.
        memory_weight: weight of memory against time.

    Units that the trace does not call (a head that only validation uses) follow the unit registered before them.
    """
    times = event_work(trace.events)
    first_call: dict[str, int] = {}
    time: dict[str, float] = dict.fromkeys(parameters, 0.0)
    activations: dict[str, int] = dict.fromkeys(parameters, 0)
    for position, event in enumerate(trace.events):
        if event.kind == "unit":
            first_call.setdefault(event.name, position)
            time[event.name] += times[position].forward
            activations[event.name] += event.saved_bytes
    order = _execution_order(list(parameters), first_call)
    units = [UnitCost(name, parameters[name], activations[name], time[name]) for name in order]
    cuts: list[int] = []
    position = len(trace.events)
    for name in reversed(order):
        # A cut before a unit that is not called is crossed by what the next called one needs.
        position = first_call.get(name, position)
        cuts.append(_crossing(trace.events, position))
    return Problem(units, num_stages, memory_weight, cuts[::-1])


def _execution_order(names: Sequence[str], first_call: Mapping[str, int]) -> list[str]:
    called = sorted(first_call, key=first_call.__getitem__)
    after: dict[str | None, list[str]] = {}
    previous: str | None = None
    for name in names:
        if name in first_call:
            previous = name
        else:
            after.setdefault(previous, []).append(name)
    order = after.get(None, [])
    for name in called:
        order += [name, *after.get(name, [])]
    return order


def _crossing(events: Sequence[Event], position: int) -> int:
    """Bytes of the values that are made before ``position`` and used from there on."""
    made = {value.id: value.nbytes for event in events[:position] for value in event.outputs}
    used = {value.id for event in events[position:] for value in event.inputs}
    return sum(nbytes for value, nbytes in made.items() if value in used)
