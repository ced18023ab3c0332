"""Column- and row-parallel layers: a region of split activations begins at the former and ends at the latter.

A column-parallel layer has some of the outputs: it reads a whole tensor, and each rank computes its own outputs. A
row-parallel layer has some of the inputs: the ranks' results are all-reduced. A column-parallel layer, any function
that treats each output alike, and a row-parallel layer together cost one sum in forward and one in backward, each of
the size of a whole activation, which is the minimum (Megatron-LM, Shoeybi et al. 2019).
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
"""For each fused matrix, the lengths of the ranks' parts."""


class ColumnParallelLayer(SplitLayer):
    """A layer with some of the outputs.

    Attributes:
        gather_output: Whether the outputs of all ranks are gathered, for code that is the same on all.
        looks_whole: Whether the result is a split tensor, which code uses as if it were whole.
        shares_input: Whether other layers of the region read the same tensor.
        randomness: Random numbers of the region, if any are drawn in it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    gather_output: bool
    looks_whole: bool = False
    shares_input: bool
    randomness: RegionRng | None
    _features: int
    """Dim of activations that is split."""

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of this rank for ``x``, which is whole or split."""
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
