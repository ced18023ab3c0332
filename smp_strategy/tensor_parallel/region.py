"""Regions in which activations are split: they begin at column-parallel layers and end at row-parallel ones.

A column-parallel layer has some of the outputs: it reads a whole tensor, and each rank goes on with outputs of its own.
A row-parallel layer has some of the inputs: what the ranks compute is added up, and all go on with the sum. A
column-parallel layer, anything that treats each output alike, and a row-parallel layer together cost one sum in forward
and one in backward, both of the size of a whole activation, which is the least.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smp_strategy.tensor_parallel.autograd_collectives import gather, split, summand
from smp_strategy.tensor_parallel.layers.base import SplitLayer
from smp_strategy.tensor_parallel.region_boundary import leave
from smp_strategy.tensor_parallel.region_rng import RegionRng
from smp_strategy.tensor_parallel.sharded_tensor.parts import Along, InParts
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor

__all__ = ["ColumnParallelLayer", "RowParallelLayer"]

Blocks = Sequence[Sequence[int]]
"""For each fused matrix the lengths of the ranks' parts."""


class ColumnParallelLayer(SplitLayer):
    """A layer with some of the outputs.

    Attributes:
        gather_output: whether the result has the outputs of all ranks, and all go on alike.
        looks_whole: whether the result is a split tensor, which code uses as if it were whole.
        shares_input: whether other layers of the region read the same tensor.
        randomness: what the region draws from, if random numbers are drawn in it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    gather_output: bool
    looks_whole: bool = False
    shares_input: bool
    randomness: RegionRng | None
    _features: int
    """The dim of activations that is split."""

    def forward(self, x: Tensor) -> Tensor:
        """Of a whole ``x``, or a split one."""
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
        splits_input: whether it gets inputs of all ranks, and reads its part of them.
        splits_output: the dim along which the result is split, where it is not to be the same on all ranks.
        randomness: what the region that ends here has drawn from.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    splits_input: bool
    splits_output: int | None = None
    randomness: RegionRng | None
    _features: int
    """The dim of activations that is split."""

    def forward(self, x: Tensor) -> Tensor:
        """The same on all ranks, or split along another dim."""
        bias = None if self.bias is None else summand(self.bias, self.group)
        own = self._product(self._part(x) if self.splits_input or isinstance(x, InParts) else x, bias)
        dim = self.splits_output
        # Where samples and tokens are one dim, features stand there.
        y = leave(own, self.group, None if dim is None or own.dim() <= dim + 1 else dim)
        if self.randomness is not None:
            self.randomness.leave()
        return y

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Of this rank."""
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
