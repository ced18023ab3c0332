"""Parameters of which ranks have parts, to those who add up, save and show values: what is whole, what is mine?

Between the first step and the end of a run a split parameter is this rank's part of it. So is whatever has its shape: a
gradient, a moment of an optimizer. Here such parts are joined and whole ones are cut, whatever layer they belong to.
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
    """See the module docstring.

    Args:
        cuts: how parameters are divided; others are the same on all ranks.
        group: the ranks that have the parts.

    Attributes:
        cuts, group: as given.
    """

    def __init__(self, cuts: Mapping[nn.Parameter, Cut], group: TensorGroup) -> None:
        self.cuts = cuts
        self.group = group

    def has(self, parameter: object) -> bool:
        """Whether ``parameter`` is split."""
        return isinstance(parameter, nn.Parameter) and parameter in self.cuts

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """The shape of all of ``parameter``."""
        return self._shape(parameter, self._cut(parameter).length) if self.has(parameter) else parameter.shape

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of this rank's part of ``parameter``, also where that is whole just now."""
        return self._shape(parameter, self._cut(parameter).length_of(self.group.rank))

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of something with the whole shape of ``parameter``, in memory of its own."""
        return self._cut(parameter).part(whole, self.group.rank)

    def fill(self, parameter: Tensor, whole: Tensor) -> None:
        """Give ``parameter`` its part of values with its whole shape."""
        self._cut(parameter).fill(parameter, whole, self.group.rank)

    def join(self, parameter: Tensor, part: Tensor) -> Tensor:
        """Something with the whole shape of ``parameter``, of which each rank has this ``part``. Collective."""
        cut = self._cut(parameter)
        lengths = [cut.length_of(rank) for rank in range(self.group.size)]
        return cut.join(self.group.gather(part.detach(), cut.dim, lengths).split(lengths, cut.dim))

    def of_ranks(self, tensor: Tensor) -> Tensor:
        """The ranks' ``tensor``, of one shape on all, stacked. Collective."""
        return self.group.gather(tensor[None], 0, [1] * self.group.size)

    def _shape(self, parameter: Tensor, length: int) -> torch.Size:
        dim = self._cut(parameter).dim
        return torch.Size([*parameter.shape[:dim], length, *parameter.shape[dim + 1 :]])

    def _cut(self, parameter: Tensor) -> Cut:
        assert isinstance(parameter, nn.Parameter)
        return self.cuts[parameter]
