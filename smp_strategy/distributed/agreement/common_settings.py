"""Settings that must be the same on all ranks, compared before anything that would hang, abort or drift apart.

A rank whose options come from another file, variable or branch (``1.0 if rank == 0 else 0.01``) trains on: replicas
clip by other norms, stages cut other microbatches, and gloo ends the process because sizes differ. Nothing else would
say why. So each door writes down what changes numbers or the number of steps, under the words in which the user has
given it, and notes it for comparison (:mod:`smp_strategy.distributed.agreement.ledger`).

Schedulers and callbacks run on every rank. One that looks at a value of a rank's own samples (``ReduceLROnPlateau`` at
a validation loss) sets learning rates apart, so each update notes the settings of its optimizer.
"""

import dataclasses
import enum
import os
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from numbers import Real
from pathlib import PurePath
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig

__all__ = [
    "differences",
    "explained",
    "named",
    "of_fields",
    "of_optimizer",
    "of_options",
    "of_process",
    "plain",
    "shown",
]

Settings = Mapping[str, str]
"""Text of each value, by the name of the setting."""

ABSENT: Final = "nothing"
"""Text for a rank that has no setting of that name."""

# Variables of others that change numbers or steps. Those of this package are options, which are compared as such.
_VARIABLES: Final = (
    *("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_SPLIT_BATCHES"),
    *("ACCELERATE_DISPATCH_BATCHES", "ACCELERATE_EVEN_BATCHES", "ACCELERATE_USE_SEEDABLE_SAMPLER", "PL_SEED_WORKERS"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)
_MOST_LETTERS: Final = 200
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, timedelta, PurePath)


def shown(value: Any) -> str:
    """Text of a setting; equal for equal settings in two processes. Of an object that is no plain value, its type."""
    if isinstance(value, enum.Enum):
        return shown(value.value)
    if isinstance(value, _PLAIN):
        text = str(value) if isinstance(value, (timedelta, PurePath)) else repr(value)
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{name!r}: {shown(value[name])}" for name in sorted(value, key=repr)) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(shown, value)) + "]"
    elif isinstance(value, (set, frozenset)):
        text = "{" + ", ".join(sorted(map(shown, value))) + "}"
    else:
        return value.__qualname__ if isinstance(value, type) else type(value).__qualname__
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}... ({zlib.crc32(text.encode()):08x})"


def of_fields(source: Any, names: Iterable[str], title: str) -> dict[str, str]:
    """Settings of the attributes ``names`` of ``source``, as far as it has them.

    Args:
        source: Object that holds them.
        names: Names of attributes.
        title: Name of a setting, with ``{}`` for that of the attribute: "`Trainer({})`".
    """
    return {title.format(name): shown(getattr(source, name)) for name in names if hasattr(source, name)}


def of_options(config: SMPConfig, title: str) -> dict[str, str]:
    """All options of this package; ``title`` as for :func:`of_fields`."""
    # Rank 0 reads the file of the partition, which may be on its disk only.
    names = [field.name for field in dataclasses.fields(config) if field.name != "partition_file"]
    return of_fields(config, names, title)


def of_process(*packages: str) -> dict[str, str]:
    """Settings of this process that change numbers: versions, modes of torch, variables of the environment.

    Args:
        packages: Packages of the door, which all ranks have loaded.
    """
    loaded = {name: sys.modules.get(name) for name in ("smp_strategy", "torch", *packages)}
    found = {f"the version of {name}": str(getattr(each, "__version__", None)) for name, each in loaded.items()}
    found["`torch.get_default_dtype()`"] = shown(torch.get_default_dtype())
    found["`torch.get_float32_matmul_precision()`"] = torch.get_float32_matmul_precision()
    found["`torch.are_deterministic_algorithms_enabled()`"] = shown(torch.are_deterministic_algorithms_enabled())
    return found | {f"the environment variable {name}": os.environ[name] for name in _VARIABLES if name in os.environ}


def of_optimizer(optimizer: Optimizer) -> dict[str, object]:
    """Settings of the parameter groups of ``optimizer``."""
    return {
        f"`{name}` of parameter group {number}": plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def plain(value: Any) -> object:
    """A setting as plain values; ``None`` if it is an object, or if it would have to be fetched from a device."""
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, Real):  # of numpy, perhaps
        return float(value)
    if type(value) is Tensor and value.numel() == 1 and value.device.type == "cpu":  # no parameter
        return value.item()
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    return None


def differences(everyones: Sequence[Mapping[Any, object]]) -> dict[Any, list[object]]:
    """Values of the ranks by the name of each setting that is not the same on all of them.

    Args:
        everyones: Settings of each rank.
    """
    names = dict.fromkeys(name for settings in everyones for name in settings)
    found = {name: [settings.get(name, ABSENT) for settings in everyones] for name in names}
    # By their text: a number that is none is equal to itself, and `True` is not 1.
    return {name: values for name, values in found.items() if len(set(map(repr, values))) > 1}


def explained(everyones: Sequence[Settings]) -> str:
    """Error message about settings of which some differ."""
    found = differences(everyones)
    lines = "\n".join(f"  {name}: {_by_ranks(values)}" for name, values in found.items())
    return (
        f"The ranks of this run were given different settings:\n{lines}\nAll ranks must be given the same. A value "
        "that depends on the rank, a configuration file or an environment variable that only some processes have, and "
        "machines with other packages are the usual reasons."
    )


def _by_ranks(values: Sequence[object]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on {named(those)}" for value, those in ranks.items())


def named(ranks: Sequence[int]) -> str:
    """``ranks`` in words; of very many, the first ones."""
    many = f"{', '.join(map(str, ranks[:8]))}{f' and {len(ranks) - 8} others' if len(ranks) > 8 else ''}"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {many}"
