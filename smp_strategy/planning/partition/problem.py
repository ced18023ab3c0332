"""Partitioning problem: units with their costs, stages with their limits, and the objective, as plain data.

The units stand in execution order and are cut into *chunks*, contiguous runs; the stage of each chunk is given (one
chunk per stage, or several under virtual stages). The objective to minimize is

    J = (1 - a) * step_time / T_ref + a * max over stages of memory / M_ref

with ``a`` the ``memory_weight``. Step time and activations of a candidate come from a simulation of its schedule
(:class:`Score`). Parameters, gradients and optimizer state of the fullest rank of a stage are counted here; a parameter
that units of the stage share counts once. T_ref is the time of a step without any waiting, M_ref the memory of the
first stage under 1F1B if all memory was spread evenly: both are constants of the problem, so J is 1 in the ideal case.

A stage may have a limit of memory; candidates beyond it are infeasible.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, final

from smp_strategy.activations.policy import ActivationPolicies
from smp_strategy.distributed.balance import balanced
from smp_strategy.model.trace.work import Work

__all__ = ["HeldBytes", "InFlight", "PartitionProblem", "Promise", "Score", "Setting", "UnitCost", "Window"]


class HeldBytes(NamedTuple):
    """Bytes that a rank holds for one parameter, or for a group of parameters that are sharded together.

    A frozen parameter has no gradient and no optimizer state.
    """

    parameter: int
    """Values, between uses."""
    gradient: int = 0
    """Gradient, between the last backward and the optimizer's step."""
    optimizer: int = 0
    """Optimizer state."""
    gathered: int = 0
    """Gathered values of sharded parameters, while they are in use."""
    unreduced: int = 0
    """Unreduced gradients of sharded parameters, before the reduce-scatter."""

    @property
    def states(self) -> int:
        """Persistent bytes: parameters, gradients and optimizer state."""
        return self.parameter + self.gradient + self.optimizer

    @property
    def passing(self) -> int:
        """Temporary bytes of a step: gathered values and unreduced gradients."""
        return self.gathered + self.unreduced

    @property
    def total(self) -> int:
        """Persistent and temporary bytes."""
        return sum(self)

    @classmethod
    def sum_of(cls, parts: Iterable["HeldBytes"]) -> "HeldBytes":
        """Sum of ``parts`` by kind."""
        return cls(*map(sum, zip(cls(0), *parts, strict=True)))


@final
@dataclass(frozen=True)
class UnitCost:
    """Costs of one unit, with the glue operations that always run on its stage."""

    name: str
    parameters: Mapping[int, HeldBytes]
    """Bytes that a rank holds of each parameter; a shared parameter has the same key in all units."""
    activation_bytes: int = 0
    """Activations of one microbatch."""
    output_bytes: int = 0
    """Results of one microbatch."""
    work: Work = Work()
    """Work of one microbatch."""
    whole: HeldBytes = HeldBytes(0)
    """Unsharded bytes of all its parameters."""

    @property
    def held(self) -> HeldBytes:
        """Bytes that a rank holds of all its parameters."""
        return HeldBytes.sum_of(self.parameters.values())


class Score(NamedTuple):
    """Simulation result of a candidate."""

    step_seconds: float
    activation_bytes: tuple[int, ...]
    """Peak of each stage."""
    activation_policies: ActivationPolicies = {}
    """Recomputation and offload of all units that do not keep everything."""


class Promise(NamedTuple):
    """Guaranteed bounds on the peak number of microbatches in flight on a stage."""

    least: int = 1
    most: int | None = None


class InFlight(NamedTuple):
    """Microbatches in flight on a stage."""

    always: Promise = Promise()
    """Bounds for any program."""
    on_chain: Promise = Promise()
    """Bounds for programs that never come back to a stage."""
    likely: int = 1
    """Estimate without guarantee."""


class Window(NamedTuple):
    """Critical paths before and after a unit's work, under any partition.

    Only work that the loss depends on counts. Backward paths consist of whole backwards, or of input gradients under a
    schedule that splits backwards.
    """

    work: Work = Work()
    saved_bytes: int = 0
    """Activations with a backward pass."""
    head: float = float("inf")
    """Forward work before the unit."""
    after: float = float("inf")
    """Forward work between the unit and the loss."""
    back: float = float("inf")
    """Backward work between the loss and the unit."""
    tail: float = float("inf")
    """Backward work after the unit."""


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """Stages, schedule bounds, limits and weights of a partitioning problem."""

    num_stages: int
    stage_of_chunk: tuple[int, ...]
    """Stage of each chunk, in execution order."""
    num_microbatches: int = 1
    memory_weight: float = 0.0
    memory_limits: tuple[int | None, ...] = ()
    """Bytes per stage; empty: unlimited."""
    stage_speeds: tuple[float, ...] = ()
    """Relative speeds; empty: all equal."""
    splits_backward: bool = False
    """Whether the schedule postpones weight gradients."""
    in_flight: tuple[InFlight, ...] = ()
    """Microbatches in flight per stage; empty: no bounds."""
    state_shards: int = 1
    """Ranks of a stage that share its optimizer state, by whole parameters."""

    @classmethod
    def plain(cls, num_stages: int, **changes: object) -> "Setting":
        """Setting with one chunk per stage."""
        return cls(num_stages=num_stages, stage_of_chunk=tuple(range(num_stages)), **changes)  # type: ignore[arg-type]

    def limit(self, stage: int) -> int | None:
        """Most bytes on ``stage``."""
        return self.memory_limits[stage] if self.memory_limits else None

    def speed(self, stage: int) -> float:
        """Relative speed of ``stage``."""
        return self.stage_speeds[stage] if self.stage_speeds else 1.0

    def flight(self, stage: int) -> InFlight:
        """Microbatches in flight on ``stage``."""
        return self.in_flight[stage] if self.in_flight else InFlight()


@final
@dataclass(frozen=True)
class PartitionProblem:
    """Units in execution order, with the setting that they are partitioned under."""

    units: Sequence[UnitCost]
    setting: Setting
    windows: Sequence[Window]
    """Window of each unit."""
    critical_forward: float
    """Seconds of the longest forward path of a single microbatch."""
    cut_bytes: Sequence[int]
    """Bytes that cross a cut before unit i, per microbatch."""
    is_chain: bool
    """Whether the program runs the units one after the other and never comes back, so that stages form a chain."""
    everywhere: Mapping[int, HeldBytes] = field(default_factory=dict)
    """Bytes that every stage holds, independent of its units, by key of the parameter."""

    def stage_of(self, starts: Sequence[int]) -> dict[str, int]:
        """Stage of each unit for chunks that begin at the units ``starts``."""
        ends = [*starts[1:], len(self.units)]
        return {
            unit.name: stage
            for stage, begin, end in zip(self.setting.stage_of_chunk, starts, ends, strict=True)
            for unit in self.units[begin:end]
        }

    def held(self, stage_of: Mapping[str, int]) -> tuple[HeldBytes, ...]:
        """Bytes on the fullest rank of each stage under an assignment of units."""
        unique = [dict(self.everywhere) for _ in range(self.setting.num_stages)]
        for unit in self.units:
            unique[stage_of[unit.name]].update(unit.parameters)
        return tuple(self._dealt_out(parameters) for parameters in unique)

    def at_least(self, held: HeldBytes) -> int:
        """Lower bound on the bytes that parameters add to the fullest rank of their stage."""
        return held.total - held.optimizer + held.optimizer // self.setting.state_shards

    def _dealt_out(self, parameters: Mapping[int, HeldBytes]) -> HeldBytes:
        """Bytes on the fullest rank of a stage with these parameters."""
        total, num_shares = HeldBytes.sum_of(parameters.values()), self.setting.state_shards
        if num_shares == 1:
            return total
        # Same balancing as ZeRO-1 at run time: trained parameters in order of registration.
        trained = [held for _, held in sorted(parameters.items()) if held.gradient]
        shares = [0] * num_shares
        for held, share in zip(trained, balanced([held.parameter for held in trained], num_shares), strict=True):
            shares[share] += held.optimizer
        return total._replace(optimizer=max(shares))

    def memory(self, stage_of: Mapping[str, int], score: Score) -> tuple[int, ...]:
        """Peak bytes of each stage."""
        held = self.held(stage_of)
        return tuple(mine.total + peak for mine, peak in zip(held, score.activation_bytes, strict=True))

    def fits(self, memory: Sequence[int]) -> bool:
        """Whether every stage stays within its limit."""
        limits = self.setting.memory_limits or [None] * len(memory)
        return all(limit is None or peak <= limit for peak, limit in zip(memory, limits, strict=True))

    def cost(self, step_seconds: float, memory: float) -> float:
        """Objective J for the memory of the fullest stage."""
        weight = self.setting.memory_weight
        return (1 - weight) * step_seconds / self.ideal_seconds + weight * memory / self.ideal_memory

    @cached_property
    def ideal_seconds(self) -> float:
        """T_ref of the objective, in seconds."""
        setting = self.setting
        speed = sum(setting.speed(stage) for stage in range(setting.num_stages))
        total = sum(sum(unit.work) for unit in self.units)
        return setting.num_microbatches * total / speed or 1.0

    @cached_property
    def ideal_memory(self) -> float:
        """M_ref of the objective, in bytes."""
        parameters = {key: held for unit in self.units for key, held in unit.parameters.items()}
        spread = sum(self.at_least(held) for key, held in parameters.items() if key not in self.everywhere)
        activations = sum(unit.activation_bytes for unit in self.units)
        return spread / self.setting.num_stages + self.everywhere_bytes + activations or 1.0

    @cached_property
    def everywhere_bytes(self) -> int:
        """Lower bound on the bytes that every stage holds, independent of its units."""
        return sum(self.at_least(held) for held in self.everywhere.values())
