"""Boundary of a split region: inputs get their gradients all-reduced, outputs are summed over the ranks.

Inside a region each rank computes something else, so the gradient of every input must be summed. If several layers of a
region read the same tensor (queries, keys and values), one sum is enough: the last input is remembered together with
its copy until the region ends.

A split input is gathered, and its gradient is reduce-scattered. Keeping the gathered tensor for the weight gradients
would cost the memory that splitting saves. So a rank keeps its part, and backward gathers again when the first of these
layers needs the whole (:class:`RegionReaders`).
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard, final

import torch
from torch import Tensor, nn

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.distributed.torch_private import is_in_backward
from smp_strategy.tensor_parallel import autograd_collectives as functions
from smp_strategy.tensor_parallel.autograd_collectives import gather, split, summand
from smp_strategy.tensor_parallel.layers.base import SplitLayer
from smp_strategy.tensor_parallel.region_rng import RegionRng
from smp_strategy.tensor_parallel.sharded_tensor.parts import Along, InParts
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor, even_lengths

__all__ = [
    "ColumnParallelLayer",
    "RowParallelLayer",
    "Entered",
    "RegionReaders",
    "as_computed",
    "enter",
    "enter_parts",
]


@final
class RegionReaders:
    """Layers that need the gathered input again in backward.

    Attributes:
        left: Number of layers whose backward is still to come.
    """

    def __init__(self, along: Along) -> None:
        self.left = 0
        self._along = along
        self._whole: Tensor | None = None

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor from the ranks' ``part``; gathered once for all of these layers."""
        group, dim, lengths = self._along
        whole = group.gather(part, dim, lengths) if self._whole is None else self._whole
        self.left -= 1
        self._whole = whole if self.left > 0 else None
        return whole


@final
class Entered(NamedTuple):
    """An input of a region."""

    tensor: Tensor
    version: int
    """Version of ``tensor`` at its entrance: after an in-place change it is another value."""
    dtype: torch.dtype
    """Dtype in which layers read it; differs under autocast."""
    has_graph: bool
    """Whether gradients are recorded."""
    whole: Tensor
    """Tensor for layers to read; its gradients are all-reduced."""
    part: Tensor | None
    """This rank's part, if the input is split."""
    readers: RegionReaders | None
    """Its readers, if the input is split."""


def enter(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The input of a region for layers to read; they share one sum of its gradients."""
    if isinstance(tensor, InParts):
        return enter_parts(tensor, group).whole
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    state = _state_of(tensor)
    if not _is_in(found := group.recall(Entered), state):
        found = Entered(*state, functions.copy(tensor.to(state[2]), group), None, None)
        group.remember(found)
    return found.whole


def enter_parts(tensor: InParts, group: TensorGroup, *, shares: bool = True) -> Entered:
    """:func:`enter` for a split tensor.

    Args:
        tensor: The split input.
        group: Group of the layers.
        shares: Whether other layers will read it.
    """
    state = _state_of(tensor)
    if not _is_in(found := group.recall(Entered), state):
        part = tensor.part.to(state[2])
        found = Entered(*state, functions.gather_split(part, *tensor.along), part, RegionReaders(tensor.along))
        if shares:
            group.remember(found)
    return found


def leave(own: Tensor, group: TensorGroup, dim: int | None = None) -> Tensor:
    """Sum of the ranks' ``own``, whose memory is reused.

    Args:
        own: Summand of this rank.
        group: Ranks of the tensor-parallel group.
        dim: Dim along which the sum is split; ``None``: all ranks get the whole.
    """
    group.forget(Entered)
    if dim is None:
        return functions.add_up(own, group)
    lengths = even_lengths(own.shape[dim], group.size)
    return SplitTensor.from_part(functions.scatter_sum(own, group, dim, lengths), group, dim, lengths)


def as_computed(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype in which matrix products are computed, so that gradients are summed in it."""
    dtype = _dtype_of(tensor)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _dtype_of(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _is_in(found: Entered | None, state: tuple[Tensor, int, torch.dtype, bool]) -> TypeGuard[Entered]:
    return found is not None and found.tensor is state[0] and found[1:4] == state[1:]


def _state_of(tensor: Tensor) -> tuple[Tensor, int, torch.dtype, bool]:
    version = 0 if tensor.is_inference() else tensor._version
    return tensor, version, _dtype_of(tensor), torch.is_grad_enabled()


# --- layers ----------------------------------------------------------------------------------------------------------
# Column- and row-parallel layers: a region of split activations begins at the former and ends at the latter.
#
# A column-parallel layer has some of the outputs: it reads a whole tensor, and each rank computes its own outputs. A
# row-parallel layer has some of the inputs: the ranks' results are all-reduced. A column-parallel layer, any function
# that treats each output alike, and a row-parallel layer together cost one sum in forward and one in backward, each of
# the size of a whole activation, which is the minimum (Megatron-LM, Shoeybi et al. 2019).


Blocks = Sequence[Sequence[int]]
"""For each fused matrix, the lengths of the ranks' parts."""


class ColumnParallelLayer(SplitLayer):
    """A layer with some of the outputs.

    Attributes:
        gather_output: Whether the outputs of all ranks are gathered, for code that is the same on all.
        looks_whole: Whether the result is a split tensor, which code uses as if it were whole.
        shares_input: Whether other layers of the region read the same tensor.
        is_inside: Whether its input is split already.
        randomness: Random numbers of the region, if any are drawn in it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    gather_output: bool
    looks_whole: bool = False
    shares_input: bool
    is_inside: bool = False
    randomness: RegionRng | None
    _features: int
    """Dim of activations that is split."""

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of this rank for ``x``, which is whole or split."""
        if not (isinstance(x, InParts) or self.is_inside or is_in_backward()):
            self.group.note_entered(f"a call of a split {type(self)._dense.__name__}", x)  # type: ignore[attr-defined]
        if self.randomness is not None and self.training:
            self.randomness.enter(x.part if isinstance(x, InParts) else x, self)
        y = self._product(x)
        if self.looks_whole:
            (lengths,) = self.cuts["weight"].blocks
            return SplitTensor.from_part(y, self.group, self._features, lengths)
        return self._gathered(y) if self.gather_output else y

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _gathered(self, y: Tensor) -> Tensor:
        dim, blocks = self._features, self.cuts["weight"].blocks
        parts = y.split([lengths[self.group.rank] for lengths in blocks], dim)
        whole = [gather(part, self.group, dim, lengths) for part, lengths in zip(parts, blocks, strict=True)]
        return torch.cat(whole, dim) if len(whole) > 1 else whole[0]


class RowParallelLayer(SplitLayer):
    """A layer with some of the inputs.

    Attributes:
        splits_input: Whether it gets the inputs of all ranks, and reads its part of them.
        splits_output: Dim along which the result is split, if it is not to be the same on all ranks.
        randomness: Random numbers of the region that ends here.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    splits_input: bool
    splits_output: int | None = None
    randomness: RegionRng | None
    _features: int
    """Dim of activations that is split."""

    def forward(self, x: Tensor) -> Tensor:
        """Sum over all ranks, whole or split along another dim."""
        bias = None if self.bias is None else summand(self.bias, self.group)
        own = self._product(self._part(x) if self.splits_input or isinstance(x, InParts) else x, bias)
        dim = self.splits_output
        # If samples and tokens share one dim, this dim holds the features.
        y = leave(own, self.group, None if dim is None or own.dim() <= dim + 1 else dim)
        if self.randomness is not None:
            self.randomness.leave()
        return y

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Summand of this rank."""
        raise NotImplementedError

    def _part(self, x: Tensor) -> Tensor:
        dim, blocks = self._features, self.cuts["weight"].blocks
        if isinstance(x, InParts):
            if x.along == Along(self.group, dim % x.dim(), tuple(blocks[0])) and len(blocks) == 1:
                return x.part
            x = x.whole()
        whole = x.split([sum(lengths) for lengths in blocks], dim)
        parts = [split(each, self.group, dim, lengths) for each, lengths in zip(whole, blocks, strict=True)]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
