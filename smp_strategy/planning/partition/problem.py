"""The partitioning problem: which stage gets which run of units, and what makes one answer better than another.

The units stand in execution order and are cut into *chunks*, contiguous runs; a chunk's stage is given (one chunk per
stage, or several under virtual stages). Minimised is

    J = (1 - a) * step_time / T_ref + a * max over stages of memory / M_ref

with ``a`` the ``memory_weight``. Step time and activations of a candidate come from a simulation of its schedule, which
somebody else does (:class:`Score`); what the fullest rank of a stage holds of parameters, gradients and optimizer state
is counted here, a parameter that units of the stage share once. T_ref is the time in which the stages would do the work
of all microbatches without ever waiting, M_ref what the first stage would hold under 1F1B if all memory was spread
evenly: both are constants of the problem, so J is 1 where everything is ideal.

A stage may have a limit of memory. An answer beyond it is none, however fast.

What one unit costs, as plain data: bytes that stay, bytes per microbatch, seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, final

from smp_strategy.activations.policy import Treatments
from smp_strategy.distributed.balance import balanced
from smp_strategy.model.trace.work import Work

__all__ = ["HeldBytes", "InFlight", "PartitionProblem", "Promise", "Score", "Setting", "UnitCost", "Window"]


class HeldBytes(NamedTuple):
    """Bytes that a rank holds of one parameter, or of some that are spread together over ranks of the stage.

    A frozen one has no gradient and no state.
    """

    parameter: int
    """Its values, between uses."""
    gradient: int = 0
    """Between the last backward and the optimizer's step."""
    optimizer: int = 0
    """State of the optimizer."""
    gathered: int = 0
    """Of parameters that are spread: the values of all ranks, while they are in use."""
    unreduced: int = 0
    """Of parameters that are spread: whole gradients, of the sum of which the rank will keep its share."""

    @property
    def states(self) -> int:
        """What stays: parameters, gradients and optimizer state."""
        return self.parameter + self.gradient + self.optimizer

    @property
    def passing(self) -> int:
        """What comes and goes during a step."""
        return self.gathered + self.unreduced

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)

    @classmethod
    def sum_of(cls, parts: Iterable["HeldBytes"]) -> "HeldBytes":
        """All of ``parts``."""
        return cls(*map(sum, zip(cls(0), *parts, strict=True)))


@final
@dataclass(frozen=True)
class UnitCost:
    """What one unit costs, together with the operations of the glue that always run where its results are."""

    name: str
    parameters: Mapping[int, HeldBytes]
    """What a rank holds of each of its parameters, by an identity that shared parameters have in common."""
    activation_bytes: int = 0
    """Kept for the backward pass of one microbatch."""
    output_bytes: int = 0
    """Bytes of its results, per microbatch."""
    work: Work = Work()
    """Of one microbatch."""
    whole: HeldBytes = HeldBytes(0)
    """All its parameters, also where each rank holds a part of them only."""

    @property
    def held(self) -> HeldBytes:
        """What a rank holds of all its parameters."""
        return HeldBytes.sum_of(self.parameters.values())


class Score(NamedTuple):
    """What the simulation says of a candidate."""

    step_seconds: float
    activation_bytes: tuple[int, ...]
    """Peak of each stage."""
    treatments: Treatments = {}
    """What units do that do not keep everything for backward."""


class Promise(NamedTuple):
    """What a schedule promises of the microbatches that a stage has begun and not finished, at their peak."""

    least: int = 1
    most: int | None = None


class InFlight(NamedTuple):
    """Microbatches in flight on a stage."""

    always: Promise = Promise()
    """Whatever the program is."""
    on_chain: Promise = Promise()
    """If the program never comes back to a stage."""
    likely: int = 1
    """What to reckon with where nothing is promised."""


class Window(NamedTuple):
    """Between what a unit's work must lie, whatever the partition is: longest ways through the program.

    Only the work counts that the loss waits for. Ways backward are made of whole backward passes, or under a schedule
    that splits these of the parts that other stages wait for.
    """

    work: Work = Work()
    saved_bytes: int = 0
    """Kept for a backward pass that really comes."""
    head: float = float("inf")
    """Forward work before it."""
    after: float = float("inf")
    """Forward work between it and the loss."""
    back: float = float("inf")
    """Backward work between the loss and it."""
    tail: float = float("inf")
    """Backward work that follows it."""


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the units are spread over, and what counts."""

    num_stages: int
    stage_of_chunk: tuple[int, ...]
    """Stage of each chunk, in execution order."""
    num_microbatches: int = 1
    memory_weight: float = 0.0
    memory_limits: tuple[int | None, ...] = ()
    """Bytes per stage; empty: there are none."""
    stage_speeds: tuple[float, ...] = ()
    """Relative; empty: all are the same."""
    splits_backward: bool = False
    """Whether gradients of weights may wait."""
    in_flight: tuple[InFlight, ...] = ()
    """What the schedule promises for each stage; empty: nothing."""
    state_shards: int = 1
    """Ranks of a stage over which the state of its optimizers is dealt out, whole parameters to each."""

    @classmethod
    def plain(cls, num_stages: int, **changes: object) -> "Setting":
        """One chunk per stage."""
        return cls(num_stages=num_stages, stage_of_chunk=tuple(range(num_stages)), **changes)  # type: ignore[arg-type]

    def limit(self, stage: int) -> int | None:
        """Most bytes on ``stage``."""
        return self.memory_limits[stage] if self.memory_limits else None

    def speed(self, stage: int) -> float:
        """Of ``stage``, relative."""
        return self.stage_speeds[stage] if self.stage_speeds else 1.0

    def flight(self, stage: int) -> InFlight:
        """Microbatches in flight on ``stage``."""
        return self.in_flight[stage] if self.in_flight else InFlight()


@final
@dataclass(frozen=True)
class PartitionProblem:
    """Units in execution order, and what to do with them."""

    units: Sequence[UnitCost]
    setting: Setting
    windows: Sequence[Window]
    """One per unit."""
    critical_forward: float
    """Seconds until one microbatch, alone, has its loss."""
    cut_bytes: Sequence[int]
    """Bytes that cross a cut before unit i, per microbatch."""
    is_chain: bool
    """Whether the program goes through the units one after the other and never back, so that stages are a chain."""
    everywhere: Mapping[int, HeldBytes] = field(default_factory=dict)
    """What every stage holds, whatever its units are, by identity."""

    def stage_of(self, starts: Sequence[int]) -> dict[str, int]:
        """Stage of each unit, if chunks begin at the units ``starts``."""
        ends = [*starts[1:], len(self.units)]
        return {
            unit.name: stage
            for stage, begin, end in zip(self.setting.stage_of_chunk, starts, ends, strict=True)
            for unit in self.units[begin:end]
        }

    def held(self, stage_of: Mapping[str, int]) -> tuple[HeldBytes, ...]:
        """What the fullest rank of each stage holds under an assignment of units."""
        unique = [dict(self.everywhere) for _ in range(self.setting.num_stages)]
        for unit in self.units:
            unique[stage_of[unit.name]].update(unit.parameters)
        return tuple(self._dealt_out(parameters) for parameters in unique)

    def at_least(self, held: HeldBytes) -> int:
        """Bytes that parameters add to the fullest rank of their stage, at least."""
        return held.total - held.optimizer + held.optimizer // self.setting.state_shards

    def _dealt_out(self, parameters: Mapping[int, HeldBytes]) -> HeldBytes:
        """What the fullest rank of a stage holds, which has these parameters."""
        total, num_shares = HeldBytes.sum_of(parameters.values()), self.setting.state_shards
        if num_shares == 1:
            return total
        # As optimizers' state is dealt out: parameters in order of registration, frozen ones apart.
        trained = [held for _, held in sorted(parameters.items()) if held.gradient]
        shares = [0] * num_shares
        for held, share in zip(trained, balanced([held.parameter for held in trained], num_shares), strict=True):
            shares[share] += held.optimizer
        return total._replace(optimizer=max(shares))

    def memory(self, stage_of: Mapping[str, int], score: Score) -> tuple[int, ...]:
        """Most bytes that each stage holds at once."""
        held = self.held(stage_of)
        return tuple(mine.total + peak for mine, peak in zip(held, score.activation_bytes, strict=True))

    def fits(self, memory: Sequence[int]) -> bool:
        """Whether every stage stays within its limit."""
        limits = self.setting.memory_limits or [None] * len(memory)
        return all(limit is None or peak <= limit for peak, limit in zip(memory, limits, strict=True))

    def cost(self, step_seconds: float, memory: float) -> float:
        """J, for the memory of the fullest stage."""
        weight = self.setting.memory_weight
        return (1 - weight) * step_seconds / self.ideal_seconds + weight * memory / self.ideal_memory

    @cached_property
    def ideal_seconds(self) -> float:
        """T_ref."""
        setting = self.setting
        speed = sum(setting.speed(stage) for stage in range(setting.num_stages))
        total = sum(sum(unit.work) for unit in self.units)
        return setting.num_microbatches * total / speed or 1.0

    @cached_property
    def ideal_memory(self) -> float:
        """M_ref."""
        parameters = {key: held for unit in self.units for key, held in unit.parameters.items()}
        spread = sum(self.at_least(held) for key, held in parameters.items() if key not in self.everywhere)
        activations = sum(unit.activation_bytes for unit in self.units)
        return spread / self.setting.num_stages + self.everywhere_bytes + activations or 1.0

    @cached_property
    def everywhere_bytes(self) -> int:
        """Bytes that every stage holds, at least."""
        return sum(self.at_least(held) for held in self.everywhere.values())
