"""The decision: which unit is on which stage, and why.

A partition is plain data. It is written as JSON, sent from rank to rank, and printed as a table.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from smp_strategy.partition.file import FORMAT, write_atomically
from smp_strategy.partition.problem import Problem

__all__ = ["Partition", "PlacedUnit"]


@final
@dataclass(frozen=True)
class PlacedUnit:
    """A unit with its stage and its costs."""

    name: str
    stage: int
    parameter_bytes: int
    activation_bytes: int
    time: float


@final
@dataclass(frozen=True)
class Partition:
    """The stage of every unit, in execution order."""

    units: tuple[PlacedUnit, ...]
    stage_costs: tuple[float, ...]
    """Weighted share of each stage in the cost of the model."""
    stage_parameter_bytes: tuple[int, ...]
    """Bytes of parameters on each stage; one that two units of a stage share counts once."""
    cut_bytes: tuple[int, ...]
    """Bytes that cross from stage s to s + 1 or further, per microbatch."""

    @classmethod
    def of(cls, problem: Problem, starts: list[int]) -> "Partition":
        """The solution of ``problem`` whose stages begin at the units ``starts``."""
        ends = [*starts[1:], len(problem.units)]
        spans = list(zip(starts, ends, strict=True))
        units = tuple(
            PlacedUnit(unit.name, stage, unit.parameter_bytes, unit.activation_bytes, unit.time)
            for stage, (begin, end) in enumerate(spans)
            for unit in problem.units[begin:end]
        )
        unique = [
            {key: size for unit in problem.units[begin:end] for key, size in unit.parameters.items()}
            for begin, end in spans
        ]
        return cls(
            units,
            tuple(problem.stage_cost(begin, end) for begin, end in spans),
            tuple(sum(sizes.values()) for sizes in unique),
            tuple(problem.cut_bytes[begin] for begin in starts[1:]),
        )

    @classmethod
    def by_hand(cls, problem: Problem, stage_of: Mapping[str, int]) -> "Partition":
        """The partition that the user asks for."""
        units = tuple(
            PlacedUnit(unit.name, stage_of[unit.name], unit.parameter_bytes, unit.activation_bytes, unit.time)
            for unit in problem.units
        )
        costs, sizes = [], []
        for stage in range(problem.num_stages):
            mine = [unit for unit in problem.units if stage_of[unit.name] == stage]
            part = Problem(mine, 1, problem.memory_weight, [])
            costs.append(part.stage_memory(0, len(mine)) / max(problem.stage_memory(0, len(problem.units)), 1))
            sizes.append(sum({key: size for unit in mine for key, size in unit.parameters.items()}.values()))
        return cls(units, tuple(costs), tuple(sizes), ())

    @property
    def stage_of(self) -> dict[str, int]:
        """Stage of each unit, by name."""
        return {unit.name: unit.stage for unit in self.units}

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_costs)

    @property
    def balance(self) -> float:
        """Mean over largest stage cost; 1.0 is perfect."""
        return sum(self.stage_costs) / len(self.stage_costs) / max(self.stage_costs)

    def to_json(self) -> str:
        """The decision with all costs."""
        return json.dumps(
            {"format": FORMAT, "num_stages": self.num_stages, "balance": self.balance, **asdict(self)}, indent=2
        )

    @classmethod
    def from_json(cls, text: str) -> "Partition":
        """The inverse of :meth:`to_json`."""
        data: Mapping[str, list] = json.loads(text)  # type: ignore[type-arg]
        return cls(
            tuple(PlacedUnit(**unit) for unit in data["units"]),
            tuple(data["stage_costs"]),
            tuple(data["stage_parameter_bytes"]),
            tuple(data["cut_bytes"]),
        )

    def save(self, path: str | Path) -> None:
        """Write the decision to a file."""
        write_atomically(path, self.to_json() + "\n")
