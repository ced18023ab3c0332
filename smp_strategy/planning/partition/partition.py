"""Partition of a model: the stage of every unit, with costs and an optimality bound.

A partition is plain data. It is written as JSON, sent from rank to rank, and printed as a table. The solver's partition
is contiguous; a manual one need not be.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self, final

from smp_strategy.activations.policy import KEEP, ActivationPolicy
from smp_strategy.config.sizes import show_count, show_seconds
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.output_file import write_atomically
from smp_strategy.planning.partition.problem import HeldBytes, PartitionProblem, Score, UnitCost
from smp_strategy.planning.partition.user_partition import FORMAT

__all__ = ["MemoryByCategory", "Partition", "PlacedUnit", "StageActivations", "StageLoad", "UnitActivations"]

# Tolerance between bounds and simulated times, which are sums in different orders.
ROUNDING = 1e-9


@final
@dataclass(frozen=True, kw_only=True)
class UnitActivations:
    """Recomputation and offload of a unit's activations, with gain and cost per microbatch."""

    treatment: ActivationPolicy = KEEP
    spared_bytes: int = 0
    """Bytes freed on the device between forward and backward."""
    offloaded_bytes: int = 0
    """Bytes in host memory between forward and backward."""
    seconds: float = 0.0
    """Added seconds of forward and backward."""

    def plus(self, spared_bytes: int, offloaded_bytes: int, seconds: float) -> "UnitActivations":
        """Sum with the amounts of another call."""
        return replace(
            self,
            spared_bytes=self.spared_bytes + spared_bytes,
            offloaded_bytes=self.offloaded_bytes + offloaded_bytes,
            seconds=self.seconds + seconds,
        )


NO_RELIEF = UnitActivations()


class StageActivations(NamedTuple):
    """Recomputation and offload on all stages."""

    of_units: Mapping[str, UnitActivations]
    """Units that do not keep everything."""
    all_kept_bytes: Sequence[int]
    """Activations of each stage if all units kept everything."""


@final
@dataclass(frozen=True)
class PlacedUnit:
    """A unit with its stage and its costs."""

    name: str
    stage: int
    chunk: int
    """Number of its chunk, a run of units on one stage, in execution order."""
    held: HeldBytes
    """Unsharded bytes of all its parameters, their gradients and optimizer state."""
    activation_bytes: int
    """Activations on the device, per microbatch."""
    output_bytes: int
    work: Work
    """Work of one microbatch on a stage of speed 1, without ``relief``."""
    relief: UnitActivations = NO_RELIEF
    """Recomputation and offload of its activations."""
    num_parameters: int | None = None
    """Number of elements of all its parameters before layers are split; ``None``: unknown."""

    @property
    def seconds(self) -> float:
        """Work of one microbatch, with recomputation."""
        return sum(self.work) + self.relief.seconds


class MemoryByCategory(NamedTuple):
    """Bytes of the fullest rank by category, at its fullest moment."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Gathered parameters and unreduced gradients."""
    activations: int
    working: int
    """Temporary results and gradients on their way, or temporary results of the optimizer."""

    @property
    def states(self) -> int:
        """Bytes that stay between steps."""
        return sum(self[:3])

    @property
    def total(self) -> int:
        """Bytes of the rank."""
        return sum(self)


@final
@dataclass(frozen=True)
class StageLoad:
    """Work of a stage, and memory of its fullest rank."""

    seconds: float
    """Work of a whole step."""
    held: HeldBytes
    """Parameters, gradients and optimizer state; a parameter that units of the stage share counts once."""
    activation_bytes: int
    """Bytes of activations when the stage is fullest."""
    memory_limit: int | None = None
    all_kept_bytes: int | None = None
    """Peak bytes of activations if units kept everything; ``None``: they do."""
    working_bytes: int = 0
    """Temporary results and gradients on their way when the stage is fullest."""
    missing_bytes: int = 0
    """Gradients that do not exist yet then."""

    @property
    def memory_bytes(self) -> int:
        """Peak bytes of everything, in the passes over the model or in the update."""
        return self.held.peak(self.activation_bytes + self.working_bytes - self.missing_bytes)

    @property
    def fullest(self) -> MemoryByCategory:
        """The same by category."""
        held, working = self.held, self.working_bytes
        if self.memory_bytes > held.total + self.activation_bytes + working - self.missing_bytes:
            return MemoryByCategory(held.parameter, held.gradient, held.optimizer, 0, 0, held.updating)
        # Below zero: not all of the room in which units take turns.
        gathered, gradient = held.passing + min(0, working), held.gradient - self.missing_bytes
        return MemoryByCategory(
            held.parameter, gradient, held.optimizer, gathered, self.activation_bytes, max(0, working)
        )


@final
@dataclass(frozen=True, kw_only=True)
class Partition:
    """Stage of every unit, in execution order, with simulated costs."""

    units: tuple[PlacedUnit, ...]
    stages: tuple[StageLoad, ...]
    cut_bytes: tuple[int, ...]
    """Bytes that cross the border between a chunk and the next, per microbatch."""
    schedule: str
    """Policy that the step was simulated with, and that it runs under."""
    chunks_per_stage: int = 1
    """Chunks per stage under that policy."""
    active_microbatches: int | None = None
    """Most microbatches in flight under that policy; ``None``: as many as it needs."""
    num_microbatches: int
    step_seconds: float
    """Simulated, like all times here: modelled or measured work of the units under the schedule."""
    cost: float
    """Objective (:mod:`smp_strategy.planning.partition.problem`)."""
    lower_bound: float
    """Lower bound on the cost of contiguous partitions under this schedule; 0 if unknown, as for a manual partition."""
    limited_by: str
    """Bottleneck of the step: ``time of stage 2``, ``memory of stage 0``."""
    most_live: int | None = None
    """Most gathered elements for prefetching, if a limit of memory has lowered them."""

    @classmethod
    def of(
        cls,
        problem: PartitionProblem,
        stage_of: Mapping[str, int],
        score: Score,
        relief: StageActivations | None = None,
        *,
        schedule: str,
        chunks_per_stage: int = 1,
        active_microbatches: int | None = None,
        lower_bound: float = 0.0,
    ) -> Self:
        """Partition with the costs of an assignment of units.

        Args:
            problem: Partitioning problem.
            stage_of: Stage of each unit, by name.
            score: Simulation result of this assignment.
            relief: Recomputation and offload; ``None``: units keep everything.
            schedule, chunks_per_stage, active_microbatches: Policy of the simulation.
            lower_bound: Lower bound on the cost of all candidates.
        """
        setting, of_units = problem.setting, {} if relief is None else relief.of_units
        runs = [list(run) for _, run in groupby(problem.units, lambda unit: stage_of[unit.name])]
        units = tuple(
            _placed(unit, stage_of[unit.name], chunk, of_units.get(unit.name, NO_RELIEF))
            for chunk, run in enumerate(runs)
            for unit in run
        )
        memory = problem.memory(stage_of, score)
        stages = tuple(
            StageLoad(
                setting.num_microbatches
                * sum(unit.seconds for unit in units if unit.stage == stage)
                / setting.speed(stage),
                held,
                peak.activations,
                setting.limit(stage),
                None if relief is None else relief.all_kept_bytes[stage],
                peak.working,
                peak.missing,
            )
            for stage, (held, peak) in enumerate(zip(problem.held(stage_of), score.peaks, strict=True))
        )
        first_of_run = [sum(map(len, runs[:chunk])) for chunk in range(1, len(runs))]
        return cls(
            units=units,
            stages=stages,
            cut_bytes=tuple(problem.cut_bytes[first] for first in first_of_run),
            schedule=schedule,
            chunks_per_stage=chunks_per_stage,
            active_microbatches=active_microbatches,
            num_microbatches=setting.num_microbatches,
            step_seconds=score.step_seconds,
            cost=problem.cost(score.step_seconds, max(memory)),
            lower_bound=lower_bound,
            limited_by=_limit(problem, stages, score),
        )

    def __repr__(self) -> str:
        counts = Counter(unit.stage for unit in self.units)
        spread = " + ".join(str(counts[stage]) for stage in range(self.num_stages))
        microbatches = show_count(self.num_microbatches, "microbatch", "microbatches")
        return (
            f"<Partition: {spread} units, {self.schedule}, {microbatches}, step {show_seconds(self.step_seconds)}, "
            f"limited by the {self.limited_by}>"
        )

    @property
    def stage_of(self) -> dict[str, int]:
        """Stage of each unit, by name."""
        return {unit.name: unit.stage for unit in self.units}

    @property
    def activation_policies(self) -> dict[str, ActivationPolicy]:
        """Recomputation and offload of all units that do not keep everything, by name."""
        return {unit.name: unit.relief.treatment for unit in self.units if not unit.relief.treatment.is_default}

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def fits(self) -> bool:
        """Whether every stage stays within its limit of memory."""
        return all(stage.memory_limit is None or stage.memory_bytes <= stage.memory_limit for stage in self.stages)

    @property
    def num_chunks(self) -> int:
        """Number of chunks on all stages."""
        return len(self.cut_bytes) + 1

    @property
    def balance(self) -> float:
        """Mean work of a stage over the largest one; 1.0 is perfect balance."""
        seconds = [stage.seconds for stage in self.stages]
        return sum(seconds) / len(seconds) / (max(seconds) or 1.0) if max(seconds) else 1.0

    @property
    def bubble(self) -> float:
        """Share of the stages' time that is idle, 0 to 1."""
        total = self.step_seconds * self.num_stages
        return max(0.0, 1.0 - sum(stage.seconds for stage in self.stages) / total) if total else 0.0

    @property
    def gap(self) -> float:
        """Optimality gap: largest share of the cost that a better partition could save; 0 if proven optimal."""
        gap = 1.0 - self.lower_bound / self.cost if self.cost else 0.0
        return gap if gap > ROUNDING else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether the partition is proven optimal among contiguous ones under this schedule."""
        return self.gap == 0.0

    def sized(self, num_parameters: Mapping[str, int]) -> Self:
        """Copy with the number of parameters of each unit, by which a file for another model is recognized."""
        units = tuple(replace(unit, num_parameters=num_parameters[unit.name]) for unit in self.units)
        return replace(self, units=units)

    def to_json(self) -> str:
        """JSON of the partition with all costs."""
        return json.dumps({"format": FORMAT, "num_stages": self.num_stages, **_named(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ConfigError: the text is no partition of this format.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            found = data.pop("format")
            del data["num_stages"]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"This is no partition as `Partition.save` writes it: {error!r}.") from None
        if found != FORMAT:
            raise ConfigError(f"The partition has format {found!r}, but this version reads format {FORMAT} only.")
        try:
            data["units"] = tuple(_unit_from(unit) for unit in data["units"])
            data["stages"] = tuple(
                StageLoad(**{**stage, "held": HeldBytes(**stage["held"])}) for stage in data["stages"]
            )
            data["cut_bytes"] = tuple(data["cut_bytes"])
            return cls(**data)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"The partition lacks a field or has one too many: {error}.") from error

    def save(self, path: str | Path) -> None:
        """Write the JSON form to a file."""
        write_atomically(path, self.to_json() + "\n")


def _placed(unit: UnitCost, stage: int, chunk: int, relief: UnitActivations) -> PlacedUnit:
    kept = unit.activation_bytes - relief.spared_bytes
    return PlacedUnit(unit.name, stage, chunk, unit.whole, kept, unit.output_bytes, unit.work, relief)


def _unit_from(data: Mapping[str, Any]) -> PlacedUnit:
    relief = data.get("relief", {})
    policy = ActivationPolicy(**relief.get("treatment", {}))
    found = {"held": HeldBytes(**data["held"]), "work": Work(**data["work"])}
    return PlacedUnit(**{**data, **found, "relief": UnitActivations(**{**relief, "treatment": policy})})


def _named(partition: Partition) -> dict[str, Any]:
    """All fields by name, with named tuples as mappings."""
    data = asdict(partition)
    for entry, unit in zip(data["units"], partition.units, strict=True):
        entry |= {"held": unit.held._asdict(), "work": unit.work._asdict()}
    for entry, stage in zip(data["stages"], partition.stages, strict=True):
        entry["held"] = stage.held._asdict()
    return data


def _limit(problem: PartitionProblem, stages: Sequence[StageLoad], score: Score) -> str:
    """Bottleneck: a memory limit that is nearly reached, or else the larger part of the cost."""
    # A limit is nearly reached if not even the smallest unit would fit in addition.
    smallest = min((unit.held.total + unit.activation_bytes for unit in problem.units), default=0)
    for number, stage in enumerate(stages):
        if stage.memory_limit is not None and stage.memory_bytes + smallest > stage.memory_limit:
            return f"memory of stage {number}"
    numbers = range(len(stages))
    slowest = max(numbers, key=lambda number: stages[number].seconds)
    fullest = max(numbers, key=lambda number: stages[number].memory_bytes)
    of_time = problem.cost(score.step_seconds, 0.0)
    of_memory = problem.cost(0.0, stages[fullest].memory_bytes)
    return f"memory of stage {fullest}" if of_memory > of_time else f"time of stage {slowest}"
