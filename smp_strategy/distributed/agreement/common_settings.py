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
import inspect
import zlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from numbers import Real
from pathlib import PurePath
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "described",
    "differences",
    "explained",
    "named",
    "of_optimizer",
    "plain",
    "shown",
]

Settings = Mapping[str, str]
"""Text of each value, by the name of the setting."""

ABSENT: Final = "nothing"
"""Text for a rank that has no setting of that name."""

_MOST_LETTERS: Final = 200
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, timedelta, PurePath)


def described(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """Classes of ``optimizers``, and numbers of parameters that they train: a rank that lacks some would drift."""
    return {
        f"optimizer {number}": f"{type(each).__name__} of {[len(group['params']) for group in each.param_groups]} "
        "parameters"
        for number, each in enumerate(optimizers)
    }


def of_optimizer(optimizer: Optimizer) -> dict[str, object]:
    """Settings of the parameter groups of ``optimizer``."""
    return {
        f"`{name}` of parameter group {number}": plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def plain(value: Any) -> object:
    """A setting as plain values; ``None`` for an object, and for what would have to be fetched from a device."""
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else _plain(value)


def _plain(value: Any) -> object:
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, Real):  # of numpy, perhaps
        return float(value)
    if type(value) is Tensor and value.numel() == 1 and value.device.type == "cpu":  # no parameter
        return value.item()
    return shown(value) if isinstance(value, (tuple, list)) else None


def shown(value: Any, levels: int = 4) -> str:
    """Text of a setting; equal for equal settings in two processes. Of an object that is no plain value, its type.

    Args:
        value: The setting.
        levels: Nesting that is looked into: an object may even hold itself.
    """
    if isinstance(value, enum.Enum):
        return shown(value.value)
    if levels and dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return f"{type(value).__qualname__}({shown(fields, levels)})"
    if isinstance(value, _PLAIN):
        text = str(value) if isinstance(value, (timedelta, PurePath)) else repr(value)
    elif levels and isinstance(value, Mapping):
        text = "{" + ", ".join(f"{name!r}: {shown(value[name], levels - 1)}" for name in sorted(value, key=repr)) + "}"
    elif levels and isinstance(value, (list, tuple)):
        text = "[" + ", ".join(shown(each, levels - 1) for each in value) + "]"
    elif levels and isinstance(value, (set, frozenset)):
        text = "{" + ", ".join(sorted(shown(each, levels - 1) for each in value)) + "}"
    else:
        named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
        return str(getattr(named, "__qualname__", type(value).__qualname__))
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}... ({zlib.crc32(text.encode()):08x})"


def differences(everyones: Sequence[Mapping[Any, object]]) -> dict[Any, list[object]]:
    """Values of the ranks by the name of each setting that is not the same on all of them."""
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
