"""What a rank holds of a tensor that is spread: rectangles of it, wherever they are in this rank's memory.

This is all that files need to know of a layout. A stage holds a whole parameter or nothing of it, a rank that splits a
layer holds some of its columns, and one that shards holds a run of its elements, which is a few rectangles::

    elements 3 to 12 of a 4 x 4 matrix        . . . a
                                              b b b b
                                              b b b b
                                              c . . .
"""

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.model.shard_layout import Rectangle

__all__ = ["HeldRectangle", "HeldTensor", "WholeObject"]


@final
@dataclass(frozen=True, eq=False)
class HeldRectangle:
    """A rectangle of a tensor."""

    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    tensor: Tensor
    """Its values: a view of this rank's memory, with the rectangle's shape. Reading a file writes them."""

    @property
    def place(self) -> Rectangle:
        """The elements of the whole tensor that these are."""
        return Rectangle(self.offsets, tuple(self.tensor.shape))


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class HeldTensor:
    """A tensor by its whole shape, and the rectangles of it that this rank has, if any. They do not overlap."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[HeldRectangle, ...]
    aliases: tuple[str, ...] = ()
    """Further keys, in the same dict, of the same tensor, which is tied: written once, found under each of them."""

    @classmethod
    def whole(cls, tensor: Tensor, *, aliases: tuple[str, ...] = ()) -> "HeldTensor":
        """Of which this rank has everything."""
        blocks = (HeldRectangle((0,) * tensor.ndim, tensor),)
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, blocks=blocks, aliases=aliases)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@final
@dataclass(frozen=True, eq=False)
class WholeObject:
    """An object that is stored as one, a dict for instance, which would otherwise be taken for a part of the state."""

    value: Any
