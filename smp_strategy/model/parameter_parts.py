"""Parameter parts: conversion between whole parameters and this rank's parts, regardless of their layers.

Between the first step and the end of a run a split parameter is this rank's part of it, and so is every tensor of its
shape: a gradient, a moment of an optimizer. Here such parts are joined and whole tensors are cut. Where no layers are
split, the one rank has all of each parameter.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.model.shard_layout import Cut

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

    @property
    def is_split(self) -> bool:
        """Whether there are other ranks, which may have other parts."""
        return self.group.size > 1

    def has(self, parameter: object) -> bool:
        return isinstance(parameter, nn.Parameter) and parameter in self.cuts

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        return self._shape(parameter, self._cut(parameter).length) if self.has(parameter) else parameter.shape

    def shape(self, parameter: Tensor) -> torch.Size:
        """Shape of this rank's part of ``parameter``, even while it is whole."""
        if not self.has(parameter):
            return parameter.shape
        return self._shape(parameter, self._cut(parameter).length_of(self.group.rank))

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of ``whole``, a tensor of the whole shape of ``parameter``, as a copy."""
        return self._cut(parameter).part(whole, self.group.rank)

    def fill(self, parameter: Tensor, whole: Tensor) -> None:
        """Copy this rank's part of ``whole`` to ``parameter``."""
        if self.has(parameter):
            self._cut(parameter).fill(parameter, whole, self.group.rank)
        else:
            parameter.copy_(whole)

    def join(self, parameter: Tensor, part: Tensor) -> Tensor:
        """Whole tensor for ``parameter`` from each rank's ``part``, in memory of its own. Collective."""
        if not self.has(parameter):
            return part.detach().clone()
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
