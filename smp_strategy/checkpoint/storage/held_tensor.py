"""Vocabulary of loading and saving: a rank's rectangles of a tensor, and states to load from.

Files know no more of a layout than that. A stage holds a whole parameter or nothing of it, a tensor-parallel rank holds
some columns, and a rank of a shard group holds a run of elements (:mod:`smp_strategy.model.shard_layout`).

Interface of states to load from: a sharded folder, or a state dict in memory.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import torch
from torch import Tensor

from smp_strategy.model.shard_layout import Rectangle

__all__ = ["HeldRectangle", "HeldTensor", "WholeObject", "TensorInfo", "Source", "with_aliases"]


@final
@dataclass(frozen=True, eq=False)
class HeldRectangle:
    """Rectangle of a tensor in this rank's memory."""

    offsets: tuple[int, ...]
    """Begin in the whole tensor."""
    tensor: Tensor
    """Values: a view of this rank's memory, with the rectangle's shape. Reading a file writes them."""

    @property
    def rectangle(self) -> Rectangle:
        """The rectangle of the whole tensor."""
        return Rectangle(self.offsets, tuple(self.tensor.shape))


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class HeldTensor:
    """Sharded tensor: its whole shape, and the rectangles of it that this rank holds, if any. They do not overlap."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[HeldRectangle, ...]
    aliases: tuple[str, ...] = ()
    """Further keys, in the same dict, of the same tensor, which is tied: written once, found under each of them."""

    @classmethod
    def whole(cls, tensor: Tensor, *, aliases: tuple[str, ...] = ()) -> "HeldTensor":
        """A tensor that this rank holds as a whole."""
        blocks = (HeldRectangle((0,) * tensor.ndim, tensor),)
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, blocks=blocks, aliases=aliases)

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


@final
@dataclass(frozen=True, eq=False)
class WholeObject:
    """Object that is stored as one, such as a dict that would otherwise be flattened as part of the state."""

    value: Any


def with_aliases(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with one name for all entries that are the same :class:`HeldTensor`, and the others as its aliases."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, HeldTensor):
            names.setdefault(id(value), []).append(name)
    found: dict[str, Any] = {}
    for name, value in state.items():
        first, *others = names.get(id(value), [name])
        if first == name:
            is_held = isinstance(value, HeldTensor)
            found[name] = replace(value, aliases=tuple(others)) if is_held else value
    return found


class TensorInfo(Protocol):
    """Metadata of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""


class Source(Protocol):
    """Tensors and other objects by their names: ``state_dict.layer.weight``, ``optimizer_0.param_groups``."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Metadata of all tensors."""

    @property
    def objects(self) -> Collection[str]:
        """Names of everything else."""

    def fill(self, wanted: Mapping[str, HeldTensor]) -> None:
        """Copy the values of tensors to this rank's rectangles.

        Raises:
            CheckpointError: a value cannot be read, or its shape is another one.
        """

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        """Objects by their names."""
