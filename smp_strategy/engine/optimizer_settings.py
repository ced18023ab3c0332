"""Settings of updates (learning rates, momenta, clipping, lengths of epochs), compared among all ranks at each update.

Schedulers and callbacks run on every rank. One that looks at a value of a rank's own samples (``ReduceLROnPlateau`` at
a validation loss) sets learning rates apart. Replicas, shards and stages would be trained with different ones, and
nothing else would notice.
"""

import zlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.common_settings import differences
from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.handle import Handle
from smp_strategy.errors import SMPError

__all__ = ["ComparedSettings"]

Settings = Mapping[str, object]
"""Plain values, by the words in which errors name them."""

_PLAIN: Final = frozenset((bool, int, float, str, type(None)))
_PARAMETERS: Final = frozenset(("params", "param_names"))


class _Comparison(NamedTuple):
    settings: Settings
    extremes: Tensor
    """The largest digest of all ranks, and the least, negated."""
    handle: Handle[object]


@final
class ComparedSettings:
    """Comparison of the settings with which the ranks have begun the last update."""

    def __init__(self) -> None:
        self._under_way: _Comparison | None = None
        self._noted: dict[str, object] = {}

    def note(self, name: str, value: object) -> None:
        """Let the next update compare ``value`` as well; ``name`` is for errors."""
        self._noted[name] = value

    def begin(self, optimizer: Optimizer, others: Settings) -> None:
        """Begin to compare, at the beginning of an update. Collective.

        The result is looked at before the next update. Until then stages may be in different steps.

        Args:
            optimizer: Optimizer that makes the update.
            others: Further settings.
        """
        self.check()
        if dist.get_world_size() == 1:
            return
        others, self._noted = {**others, **self._noted}, {}
        settings = _settings_of(optimizer) | {name: _known(value) for name, value in others.items()}
        digest = zlib.crc32(repr(settings).encode())
        extremes = torch.tensor([digest, -digest], device="cpu")
        doing = "the settings of optimizers"
        handle = collectives.all_reduce(extremes, dist.ReduceOp.MAX, group=None, doing=doing)
        self._under_way = _Comparison(settings, extremes, handle)

    def check(self) -> None:
        """Wait for the result, if there is one to come; before the next update or save. Collective.

        Raises:
            SMPError: Settings differ, on all ranks.
        """
        if self._under_way is None:
            return
        (settings, extremes, handle), self._under_way = self._under_way, None
        handle.wait()
        if extremes[0] != -extremes[1]:
            raise SMPError(_difference(collectives.gather_objects(settings, "settings of optimizers that differ")))


def _settings_of(optimizer: Optimizer) -> dict[str, object]:
    return {
        f"`{name}` of parameter group {number}": _known(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in _PARAMETERS
    }


def _known(value: Any) -> object:
    """A setting as plain values; ``None`` if it is an object, or if it would have to be fetched from a device."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Real):  # of numpy, perhaps
        return float(value)
    if type(value) is Tensor and value.numel() == 1 and value.device.type == "cpu":  # no parameter
        return value.item()
    if isinstance(value, tuple | list):
        return tuple(map(_known, value))
    return None


def _difference(everyones: Sequence[Settings]) -> str:
    """The first setting that differs, with its values."""
    name, found = next(iter(differences(everyones).items()))
    values = [f"{value!r} on rank {rank}" for rank, value in enumerate(found)]
    return (
        f"The last update had other settings on some ranks: {name} is {', '.join(values)}. A scheduler or callback "
        "that goes by a value of one rank's own samples, such as `ReduceLROnPlateau`, is the usual reason: average the "
        f"value over all ranks before ({door_words().average}). The weights are a mixture: load a checkpoint."
    )
