"""Given partition: the user's decisions before the first step, by hand or from a file.

Decisions that do not fit are refused during set-up, before the ranks have done anything. Stages of modules that the
user has set are never ignored: if they would have no effect it is an error, because SageMaker's library ignores them
silently and nobody notices.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from smp_strategy.activations.policy import ActivationPolicies
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.errors import ConfigError
from smp_strategy.model.annotations import placed_modules
from smp_strategy.model.units import Unit, choose_units
from smp_strategy.planning.output_file import refuse_unwritable
from smp_strategy.planning.partition.user_partition import ByHand, read_partition, some

__all__ = ["GivenPartition", "choose_placed_units", "num_parameters_of", "place_beforehand", "refuse_unwritable_file"]


class GivenPartition(NamedTuple):
    """Stages and activation policies that the user has decided."""

    stage_of: Mapping[str, int]
    activation_policies: ActivationPolicies = {}
    """Activation policies of units, if a file has them."""


def choose_placed_units(config: SMPConfig, module: nn.Module, num_stages: int) -> list[Unit]:
    """Units of ``module``, none of which has parts that are placed on different stages.

    Raises:
        ConfigError: a module that must stay whole is placed on several stages, or modules are placed by hand although
            the library is to choose.
    """
    by_hand = ByHand(placed_modules(module), config.default_partition)
    if config.auto_partition and not config.load_partition and by_hand.stages:
        raise ConfigError(
            f"{some(by_hand.outermost())} {'is' if len(by_hand.outermost()) == 1 else 'are'} placed by hand, but "
            "`auto_partition` is True and would choose other stages. Set `auto_partition=False`, or do not place "
            "modules with `set_partition` and `partition`."
        )
    stage_of = by_hand.stage_of if by_hand.stages else None
    num_chunks = num_stages * (config.chunks_per_stage or 1)
    return choose_units(module, num_chunks, config.unit_classes, stage_of=stage_of)


def place_beforehand(
    config: SMPConfig, module: nn.Module, units: Sequence[Unit], num_stages: int
) -> GivenPartition | None:
    """Stage of every unit, if the user has set it; ``None`` if the library is to choose.

    Collective if there are ranks: they read a file together.

    Raises:
        ConfigError: the user's decision does not fit the model or the number of stages.
    """
    by_hand = ByHand(placed_modules(module), config.default_partition)
    if not config.auto_partition:
        return GivenPartition(by_hand.place([unit.name for unit in units], num_stages))
    if not config.load_partition:
        return None if units else GivenPartition({})  # a bare layer, say, leaves nothing to choose
    assert config.partition_file is not None
    saved = read_partition(_text_on_rank_0(config.partition_file), config.partition_file)
    stage_of = saved.place(num_parameters_of(units), num_stages, config.chunks_per_stage)
    for name, stage in stage_of.items():
        if by_hand.stage_of(name) not in (None, stage):
            raise ConfigError(
                f"`{name}` is on stage {stage} in {config.partition_file}, but is placed on stage "
                f"{by_hand.stage_of(name)} by hand. Change one of them."
            )
    return GivenPartition(stage_of, saved.activation_policies)


def num_parameters_of(units: Sequence[Unit]) -> dict[str, int]:
    """Number of parameter elements of each unit whose layers are not split yet."""
    return {unit.name: sum(parameter.numel() for parameter in unit.module.parameters()) for unit in units}


def refuse_unwritable_file(config: SMPConfig) -> None:
    """Refuse a `partition_file` that the first step could not write. Collective: rank 0 looks, and all fail.

    Raises:
        ConfigError: it cannot be written.
    """
    if config.partition_file is None or config.load_partition:
        return
    problems: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            refuse_unwritable(config.partition_file, "partition_file")
        except ConfigError as error:
            problems = list(error.problems)
    problems = collectives.tell(problems, 0, "a look at `partition_file`")
    if problems[0] is not None:
        raise ConfigError(problems)


def _text_on_rank_0(path: str) -> str:
    """Content of a file that only the first machine may have; all ranks fail if it cannot be read."""
    found: list[Any] = [None, None]
    are_ranks = dist.is_initialized()
    if not are_ranks or dist.get_rank() == 0:
        try:
            found[0] = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            found[1] = str(error)
    if are_ranks:
        found = collectives.tell(found, 0, "the content of `partition_file`")
    text, problem = found
    if problem is not None:
        raise ConfigError(f"`partition_file` cannot be read: {problem}. Write it with a run without `load_partition`.")
    assert isinstance(text, str)
    return text
