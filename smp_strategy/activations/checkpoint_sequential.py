"""Checkpointing of layers in a row that the user's step asks for as it goes, by the name that SageMaker gives it.

It is PyTorch's `checkpoint`, called once per group. In code above the units that reaches the runtime, which has the
units inside keep their inputs; inside of a unit, and in an ordinary process, it is PyTorch's.
"""

from collections.abc import Sequence
from typing import Any, final

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from smp_strategy.config.options import group_size
from smp_strategy.errors import ConfigError

__all__ = ["LayersInARow", "checkpoint_sequential"]


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """``sequential(input)``, layer by layer or in groups, each of which keeps its input only.

    Args:
        sequential: the layers.
        input: of the first one.
        strategy: ``each`` layer by itself, all of a stage together (``contiguous``), or N of them (``group_N``). No
            group spans stages.
        preserve_rng_state: draw the same random numbers again.
        pack_args_as_tuple: a layer that returns a tuple gives it to the next one as it is, and not as its arguments.

    Raises:
        ConfigError: ``strategy`` is none of these.
    """
    size = group_size(strategy)
    if size == 0:
        raise ConfigError(f"`strategy` must be each, contiguous or group_N with N from 1 on, but is {strategy!r}.")
    layers = list(sequential.children())
    step = size or max(len(layers), 1)
    for first in range(0, len(layers), step):
        row = LayersInARow(layers[first : first + step], size, pack_args_as_tuple)
        input = torch_checkpoint.checkpoint(row, input, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    return input


@final
class LayersInARow:
    """Layers that are called one after the other, as one function.

    Args:
        layers: in their order.
        group: how many of them are to be computed again together; ``None``: as many as possible.
        packs: whether a tuple is one argument.
    """

    def __init__(self, layers: Sequence[nn.Module], group: int | None, packs: bool) -> None:
        self.group = group
        self._layers = layers
        self._packs = packs

    def __call__(self, value: Any) -> Any:
        for layer in self._layers:
            value = layer(*value) if isinstance(value, tuple) and not self._packs else layer(value)
        return value
