"""Recipes: short names of options, like ``pp4_zbv_mb16``, for command lines, file names and environment variables."""

import re
from typing import Any

from smp_strategy.errors import ConfigError

__all__ = ["MICROBATCHES_PER_STAGE", "named_replicas", "parse_recipe"]

_BY_HYDRA = "smp="

# Default number of microbatches per stage; it keeps the bubble below 20 %.
MICROBATCHES_PER_STAGE = 4

_SCHEDULES = {
    "interleaved": "interleaved",
    "simple": "simple",
    "1f1b": "1f1b",
    "zbh1": "zb-h1",
    "zbh2": "zb-h2",
    "zbv": "zb-v",
    "auto": "auto",
}
_NUMBERS = {
    "pp": "pipeline_parallel_degree",
    "v": "virtual_pipeline_degree",
    "tp": "tensor_parallel_degree",
    "sdp": "sharded_data_parallel_degree",
    "mb": "microbatches",
}
_NUMBER = re.compile(r"(pp|v|tp|sdp|mb)(\d{1,9})")
_MICS = re.compile(r"mics(\d{1,9})x(\d{1,9})")


def parse_recipe(name: str, door: str = _BY_HYDRA) -> dict[str, Any]:
    """Parse a recipe: ``pp2``, ``pp4_mb16``, ``pp4_1f1b_v2``, ``tp2_pp2``, ``mics2x2``, ``zero1``.

    ``vN`` gives every rank N chunks of the model. Schedules are named as in the option ``pipeline``, without hyphens.
    ``micsAxB`` shards over A ranks and replicates B times; B is no option, because it follows from the number of ranks
    (:func:`named_replicas`). A name that shards something or splits layers, and has no ``pp``, means one stage.

    Args:
        name: the recipe.
        door: what stands before it where the user wrote it, for errors: ``smp=``, ``SMP_CONFIG=``.

    Raises:
        ConfigError: a part that is not understood, that stands twice, or that is 0.
    """
    options = _parts(name, door)
    if options.keys() & {"sharded_data_parallel_degree", "shard_optimizer_state", "tensor_parallel_degree"}:
        options.setdefault("pipeline_parallel_degree", 1)
    return options


def _parts(name: str, door: str = _BY_HYDRA) -> dict[str, Any]:
    """The options that stand in a recipe, without those that follow from them."""
    options: dict[str, Any] = {}
    for part in name.split("_"):
        key, value = _option(f"{door}{name}", part)
        if key in options:
            raise ConfigError(f"`{door}{name}`: `{key}` is given twice.")
        options[key] = value
    return options


def named_replicas(name: str) -> int:
    """Number of replicas in a recipe: the B of ``micsAxB``, else 1."""
    return max((int(match[2]) for part in name.split("_") if (match := _MICS.fullmatch(part))), default=1)


def _option(written: str, part: str) -> tuple[str, Any]:
    if match := _NUMBER.fullmatch(part):
        if int(match[2]) == 0:
            raise ConfigError(f"`{written}`: {part} must be {match[1]}1 or more, or be left out.")
        return _NUMBERS[match[1]], int(match[2])
    if match := _MICS.fullmatch(part):
        if int(match[2]) == 0:
            raise ConfigError(f"`{written}`: {part} has 0 replicas. Write micsNx1 for one.")
        return "sharded_data_parallel_degree", int(match[1])
    if part == "zero1":
        return "shard_optimizer_state", True
    if part in _SCHEDULES:
        return "pipeline", _SCHEDULES[part]
    raise ConfigError(
        f"`{written}`: the part {part!r} is not understood. Parts are ppN, vN, tpN, sdpN, micsNxM, zero1, mbN and a "
        f"schedule ({', '.join(_SCHEDULES)}), joined by `_`, e.g. pp2_mb8."
    )
