"""Conversion between whole parameters and this rank's parts, for gradient sums, checkpoints and inspection.

Between the first step and the end of a run a split parameter is this rank's part of it, and so is every tensor of its
shape: a gradient, a moment of an optimizer. Here such parts are joined and whole tensors are cut, regardless of the
layer they belong to.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.model.shard_layout import Cut
from smp_strategy.tensor_parallel.group import TensorGroup

__all__ = ["ParameterParts"]


@final
class ParameterParts:
    """Split parameters of a module.

    Args:
        cuts: Cuts of the split parameters; others are the same on all ranks.
        group: Ranks that have the parts.

    Attributes:
        cuts, group: As given.
    """

    def __init__(self, cuts: Mapping[nn.Parameter, Cut], group: TensorGroup) -> None:
        self.cuts = cuts
        self.group = group

    def has(self, parameter: object) -> bool:
        """Whether ``parameter`` is split."""
        return isinstance(parameter, nn.Parameter) and parameter in self.cuts

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Shape of the whole ``parameter``."""
        return self._shape(parameter, self._cut(parameter).length) if self.has(parameter) else parameter.shape

    def shape(self, parameter: Tensor) -> torch.Size:
        """Shape of this rank's part of ``parameter``, even while it is whole."""
        return self._shape(parameter, self._cut(parameter).length_of(self.group.rank))

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of ``whole``, a tensor of the whole shape of ``parameter``, as a copy."""
        return self._cut(parameter).part(whole, self.group.rank)

    def fill(self, parameter: Tensor, whole: Tensor) -> None:
        """Copy this rank's part of ``whole`` to ``parameter``."""
        self._cut(parameter).fill(parameter, whole, self.group.rank)

    def join(self, parameter: Tensor, part: Tensor) -> Tensor:
        """Whole tensor for ``parameter`` from each rank's ``part``. Collective."""
        cut = self._cut(parameter)
        lengths = [cut.length_of(rank) for rank in range(self.group.size)]
        return cut.join(self.group.gather(part.detach(), cut.dim, lengths).split(lengths, cut.dim))

    def of_ranks(self, tensor: Tensor) -> Tensor:
        """Stack of the ranks' ``tensor``, of one shape on all. Collective."""
        return self.group.gather(tensor[None], 0, [1] * self.group.size)

    def _shape(self, parameter: Tensor, length: int) -> torch.Size:
        dim = self._cut(parameter).dim
        return torch.Size([*parameter.shape[:dim], length, *parameter.shape[dim + 1 :]])

    def _cut(self, parameter: Tensor) -> Cut:
        assert isinstance(parameter, nn.Parameter)
        return self.cuts[parameter]
