"""Partitions that users give: files, which a job writes, people edit and another job loads; and stages set by hand.

Only the stage of each unit is taken from the file. Costs are there for the reader, and the loading job computes its
own; the order of the units is that of execution and does not matter. The numbers of parameters are compared, to refuse
a partition for a model of another size.

Manual partition: a unit's stage is that of the nearest enclosing module with a stage set by the user.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final, get_args

from smp_strategy.activations.policy import ActivationPolicies, ActivationPolicy, Recompute
from smp_strategy.errors import ConfigError

__all__ = ["FORMAT", "read_partition", "ByHand", "some"]


FORMAT = 1
"""Version of the file format; it changes when an older reader would misunderstand the file."""


@final
@dataclass(frozen=True)
class SavedPartition:
    """Content of a partition file that the loading job uses."""

    source: str
    """Name of the file, for messages."""
    num_stages: int
    stage_of: Mapping[str, int]
    """Stage of each unit, in the order of the file."""
    num_parameters: Mapping[str, int]
    """Number of parameters of each unit that has it in the file."""
    chunks_per_stage: int | None = None
    """Chunks per stage of the schedule; ``None`` if the file has none."""
    activation_policies: ActivationPolicies = field(default_factory=dict)
    """Recomputation and offload of each unit that has them in the file."""

    def place(
        self, num_parameters: Mapping[str, int], num_stages: int, chunks_per_stage: int | None = None
    ) -> dict[str, int]:
        """Stage of every unit of a model.

        Args:
            num_parameters: Number of parameters of each unit of the model.
            num_stages: Number of stages of this run.
            chunks_per_stage: Chunks per stage of this run's schedule; ``None``: as in the file.

        Raises:
            ConfigError: the file does not fit, with the first difference.
        """
        problem = self._other_layout(num_stages, chunks_per_stage) or self._other_unit(num_parameters)
        is_empty = not num_parameters and num_stages == 1  # a model that cannot be cut
        problems = [problem] if problem else [] if is_empty else _stage_problems(self.stage_of, num_stages)
        if problems:
            raise ConfigError([f"The partition in {self.source} does not fit. {problem}" for problem in problems])
        return {name: self.stage_of[name] for name in num_parameters}

    def _other_layout(self, num_stages: int, chunks_per_stage: int | None) -> str | None:
        if self.num_stages != num_stages:
            return (
                f"It is for {self.num_stages} stages, but there are {num_stages}. Set `pipeline_parallel_degree="
                f"{self.num_stages}`, or make a partition for {num_stages}."
            )
        mine = self.chunks_per_stage
        if mine is not None and chunks_per_stage not in (None, mine):
            return (
                f"It has {mine} chunks per stage, but the schedule is for {chunks_per_stage}. Set "
                f"`virtual_pipeline_degree={mine}`, or make a partition for {chunks_per_stage}."
            )
        return None

    def _other_unit(self, num_parameters: Mapping[str, int]) -> str | None:
        for number, name in enumerate(self.stage_of):
            if name not in num_parameters:
                near = difflib.get_close_matches(name, num_parameters, n=1)
                hint = f" (`{near[0]}`, perhaps?)" if near else ""
                return f"Unit {number} of the file is `{name}`, which is no unit of this model{hint}."
            size = self.num_parameters.get(name, num_parameters[name])
            if size != num_parameters[name]:
                return (
                    f"Unit {number} of the file, `{name}`, has {size} parameters there, but "
                    f"{num_parameters[name]} in this model."
                )
        for number, name in enumerate(num_parameters):
            if name not in self.stage_of:
                return f"Unit {number} of this model is `{name}`, which is not in the file."
        return None


def read_partition(text: str, source: str) -> SavedPartition:
    """Parse a partition file.

    Raises:
        ConfigError: it is no partition, or has another format.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid JSON: {error}.") from None
    except RecursionError:
        raise ConfigError(
            f"{source} is no partition: its JSON is nested too deeply. Write a new one with `partition_file`."
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise ConfigError(
            f"{source} is no partition of format {FORMAT}: its `format` is {found!r}. Write a new one with "
            "`partition_file`."
        )
    units = _field(data, "units", list, source)
    stages: dict[str, int] = {}
    sizes: dict[str, int] = {}
    activation_policies: dict[str, ActivationPolicy] = {}
    for number, unit in enumerate(units):
        where = f"unit {number} of {source}"
        if not isinstance(unit, dict):
            raise ConfigError(f"{where[0].upper()}{where[1:]} must be an object with a name and a stage.")
        name = _field(unit, "name", str, where)
        if name in stages:
            raise ConfigError(f"{source} has two units of the name `{name}`. Remove one.")
        stages[name] = _field(unit, "stage", int, where)
        if unit.get("num_parameters") is not None:
            sizes[name] = _field(unit, "num_parameters", int, where)
        if "relief" in unit:
            activation_policies[name] = _policy(_field(unit, "relief", dict, where), f"`relief` of {where}")
    chunks = _field(data, "chunks_per_stage", int, source) if "chunks_per_stage" in data else None
    return SavedPartition(source, _field(data, "num_stages", int, source), stages, sizes, chunks, activation_policies)


def _policy(data: Mapping[str, Any], where: str) -> ActivationPolicy:
    found = _field(data, "treatment", dict, where)
    try:
        policy = ActivationPolicy(**found)
    except TypeError as error:
        raise ConfigError(f"`treatment` in {where} has a field that is not known: {error}.") from None
    if policy.recompute not in get_args(Recompute):
        known = ", ".join(get_args(Recompute))
        raise ConfigError(f"`recompute` in {where} must be one of {known}, but is {policy.recompute!r}.")
    return policy


def _field(data: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = data.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        words = {list: "a list", dict: "an object", str: "a text", int: "a whole number"}
        raise ConfigError(f"`{key}` of {where} must be {words[kind]}, but is {value!r}.")
    return value


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
        problems += _stage_problems(found, num_stages)
        if problems:
            raise ConfigError(problems)
        return found


def _above(name: str) -> Iterator[str]:
    """Names of the enclosing modules of ``name``, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _stage_problems(stage_of: Mapping[str, int], num_stages: int) -> list[str]:
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
