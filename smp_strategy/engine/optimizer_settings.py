"""Settings of optimizers (learning rates, momenta, weight decay), compared among all ranks at each update.

Schedulers run on every rank. One that looks at a value of a rank's own samples (``ReduceLROnPlateau`` at a validation
loss) sets learning rates apart. Replicas, shards and stages would be trained with different ones, and nothing else
would notice.
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
from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.handle import Handle
from smp_strategy.errors import SMPError

__all__ = ["ComparedSettings"]

Settings = Sequence[Mapping[str, object]]
"""By parameter group."""

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

    def begin(self, optimizer: Optimizer) -> None:
        """Begin to compare, at the beginning of an update. Collective.

        The result is looked at before the next update. Until then stages may be in different steps.
        """
        self.check()
        if dist.get_world_size() == 1:
            return
        settings = _settings_of(optimizer)
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


def _settings_of(optimizer: Optimizer) -> Settings:
    return [
        {name: _known(value) for name, value in group.items() if name not in _PARAMETERS}
        for group in optimizer.param_groups
    ]


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
    groups = [dict(enumerate(settings)) for settings in everyones]
    number, name = next(
        (number, name)
        for number in sorted({number for each in groups for number in each})
        for name in sorted({name for each in groups for name in each.get(number, {})})
        if len({repr(each.get(number, {}).get(name)) for each in groups}) > 1
    )
    values = [f"{each.get(number, {}).get(name)!r} on rank {rank}" for rank, each in enumerate(groups)]
    return (
        f"The last update had other settings on some ranks: `{name}` of parameter group {number} is "
        f"{', '.join(values)}. A scheduler that steps by a value of one rank's own samples, such as "
        f"`ReduceLROnPlateau`, is the usual reason: average the value over all ranks before "
        f"({door_words().average}). The weights are a mixture: load a checkpoint."
    )
