"""``checkpoint_sequential``: activation checkpointing of consecutive layers at their call, under SageMaker's name.

It calls PyTorch's `checkpoint` once per group. In code above the units the runtime intercepts that call and checkpoints
the units inside; inside a unit, and in an ordinary process, PyTorch's own runs.
"""

from collections.abc import Sequence
from typing import Any, final

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from smp_strategy.config.activation_options import group_size
from smp_strategy.errors import ConfigError

__all__ = ["LayersInARow", "checkpoint_sequential"]


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """``sequential(input)`` with checkpoints around each layer or group of layers.

    Args:
        sequential: The layers.
        input: Input of the first layer.
        strategy: ``each`` layer by itself, all of a stage together (``contiguous``), or N of them (``group_N``). No
            group spans stages.
        preserve_rng_state: Draw the same random numbers when recomputing.
        pack_args_as_tuple: Pass a tuple that a layer returns to the next layer as one argument instead of unpacking
            it.

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
    """Consecutive layers as one function.

    Args:
        layers: The layers, in order.
        group: Number of layers that are recomputed together; ``None``: as many as possible.
        packs: Whether a tuple is passed as one argument.
    """

    def __init__(self, layers: Sequence[nn.Module], group: int | None, packs: bool) -> None:
        self.group = group
        self._layers = layers
        self._packs = packs

    def __call__(self, value: Any) -> Any:
        for layer in self._layers:
            value = layer(*value) if isinstance(value, tuple) and not self._packs else layer(value)
        return value
