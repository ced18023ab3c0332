"""Degrees: whether they fit the number of ranks and the units of a model."""

from collections.abc import Sequence

from smp_strategy.errors import ConfigError

__all__ = ["check_degree"]


def check_degree(
    pp: int, world_size: int, units: Sequence[str] | None = None, *, dp_shard: int = 1, tp: int = 1
) -> None:
    """Refuse degrees that do not fit the ranks or the units of the model, if these are known.

    Args:
        pp: Number of stages.
        world_size: Number of ranks.
        units: Names of the units of the model.
        dp_shard: Number of ranks in a shard group.
        tp: Number of ranks over which a layer is split.

    Raises:
        ConfigError: with all reasons.
    """
    problems = []
    if world_size % tp:
        problems.append(
            f"`tensor_parallel_degree` must divide the number of ranks ({world_size}), but is {tp}. "
            f"Degrees that fit: {_divisors(world_size)}."
        )
    elif (num_stage_ranks := world_size // tp) % pp:
        beside = f": {num_stage_ranks} for each of {tp} over which layers are split" if tp > 1 else ""
        problems.append(
            f"`pipeline_parallel_degree` must divide the number of ranks ({world_size}{beside}), but is {pp}. "
            f"Degrees that fit: {_divisors(num_stage_ranks)}."
        )
    elif (dp := world_size // (pp * tp)) % dp_shard:
        problems.append(
            f"`sharded_data_parallel_degree` must divide the number of replicas ({dp}: {world_size} ranks, {pp * tp} "
            f"for each replica), but is {dp_shard}. Degrees that fit: {_divisors(dp)}."
        )
    if units is not None and pp > max(len(units), 1):  # one stage runs the outermost module even if that is all
        problems.append(
            f"`pipeline_parallel_degree` is {pp}, but the model can be cut into {len(units)} units only "
            f"({_some(units)}). Choose a degree that is not larger."
        )
    if problems:
        raise ConfigError(problems)


def _some(names: Sequence[str]) -> str:
    shown = [*names[:4], "...", names[-1]] if len(names) > 8 else names
    return ", ".join(shown) or "none"


def _divisors(number: int) -> str:
    return ", ".join(str(degree) for degree in range(1, number + 1) if number % degree == 0)
