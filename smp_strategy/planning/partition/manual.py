"""Manual partition: a unit's stage is that of the nearest enclosing module with a stage set by the user."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from smp_strategy.errors import ConfigError

__all__ = ["ByHand", "some", "stage_problems"]

# Names shown in a message.
MOST_NAMES = 3


@final
@dataclass(frozen=True)
class ByHand:
    """Stages of modules, by qualified name; ``""`` is the whole model."""

    stages: Mapping[str, int]
    default: int | None = None
    """The stage of everything else."""

    def stage_of(self, name: str) -> int | None:
        """Stage of the module ``name``: its own, or that of the nearest module around it that has one."""
        around = (above for above in (name, *_above(name)) if above in self.stages)
        nearest = next(around, None)
        return self.default if nearest is None else self.stages[nearest]

    def outermost(self) -> list[str]:
        """Names of the modules with a stage and no enclosing module with one."""
        return [name or "the model" for name in self.stages if not any(above in self.stages for above in _above(name))]

    def place(self, units: Sequence[str], num_stages: int) -> dict[str, int]:
        """Stage of every unit.

        Raises:
            ConfigError: a stage does not exist or has no unit, or a unit has no stage.
        """
        if not units and num_stages == 1:  # a bare layer, say, leaves nothing to place
            return {}
        placed = {name: self.stage_of(name) for name in units}
        lost = [name for name, stage in placed.items() if stage is None]
        problems = []
        if lost:
            problems.append(
                f"`auto_partition` is False, and nobody has placed {some(lost)}. Place what is left with "
                "`smp_strategy.set_partition(module, stage)`, or give `default_partition`."
            )
        found = {name: stage for name, stage in placed.items() if stage is not None}
        problems += stage_problems(found, num_stages)
        if problems:
            raise ConfigError(problems)
        return found


def _above(name: str) -> Iterator[str]:
    """Names of the enclosing modules of ``name``, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def stage_problems(stage_of: Mapping[str, int], num_stages: int) -> list[str]:
    """Error texts for stages that do not exist and for stages without a unit."""
    problems = []
    for wrong in sorted({stage for stage in stage_of.values() if not 0 <= stage < num_stages}):
        names = [name for name, stage in stage_of.items() if stage == wrong]
        problems.append(
            f"{some(names)} {'is' if len(names) == 1 else 'are'} placed on stage {wrong}, but with "
            f"{num_stages} stages these are numbered 0 to {num_stages - 1}. Choose one of them, or another "
            "`pipeline_parallel_degree`."
        )
    empty = sorted(set(range(num_stages)) - set(stage_of.values()))
    if empty and not stage_of:
        problems.append(
            f"No unit is on stage {', '.join(map(str, empty))}, because the model cannot be cut into units. Set "
            "`pipeline_parallel_degree=1`."
        )
    elif empty:
        problems.append(
            f"No unit is on stage {', '.join(map(str, empty))}. Place one of {some(list(stage_of))} there, or choose "
            "a smaller `pipeline_parallel_degree`."
        )
    return problems


def some(names: Sequence[str]) -> str:
    """A few of ``names`` for a message."""
    shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMES])
    rest = len(names) - MOST_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
