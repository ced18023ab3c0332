"""Where a split region begins and ends: whole values come in, and a sum of all ranks comes out.

Everything in between is a matter of each rank, so whatever comes in has a gradient that must be added up. Where several
layers of a region read the same tensor (queries, keys and values), one sum is enough for all of them: the tensor that
came in last is remembered together with its copy, until the region ends.

A tensor of which each rank has a part is put together for them, and its gradient goes back in parts. Keeping the whole
for the gradients of their weights would cost what the parts save. So a rank keeps its part, and in backward the parts
are put together once more, when the first of these layers needs the whole (:class:`RegionReaders`).
"""

from typing import NamedTuple, TypeGuard, final

import torch
from torch import Tensor

from smp_strategy.tensor_parallel import autograd_collectives as functions
from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.sharded_tensor.parts import Along, InParts
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor, even_lengths

__all__ = ["Entered", "RegionReaders", "as_computed", "enter", "enter_parts", "leave"]


@final
class RegionReaders:
    """The layers that need a whole tensor again in backward.

    Args:
        along: how it is split.

    Attributes:
        left: how many of them are still to come.
    """

    def __init__(self, along: Along) -> None:
        self.left = 0
        self._along = along
        self._whole: Tensor | None = None

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor, of which this rank has kept ``part``."""
        group, dim, lengths = self._along
        whole = group.gather(part, dim, lengths) if self._whole is None else self._whole
        self.left -= 1
        self._whole = whole if self.left > 0 else None
        return whole


@final
class Entered(NamedTuple):
    """What came in."""

    tensor: Tensor
    version: int
    """Of ``tensor`` when it came in: a later change in place makes it another value."""
    dtype: torch.dtype
    """In which layers read it: autocast begins and ends."""
    has_graph: bool
    """Whether gradients are wanted."""
    whole: Tensor
    """For layers to read; their gradients are added up."""
    part: Tensor | None
    """What this rank has of it, if it came in parts."""
    readers: RegionReaders | None
    """Likewise."""


def enter(tensor: Tensor, group: TensorGroup) -> Tensor:
    """``tensor``, whole, for layers of a region to read; they share one sum of its gradients."""
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
    """The same for a tensor that comes in parts.

    Args:
        tensor: what comes in.
        group: of the layers.
        shares: whether other layers will read it.
    """
    state = _state_of(tensor)
    if not _is_in(found := group.recall(Entered), state):
        part = tensor.part.to(state[2])
        found = Entered(*state, functions.gather_split(part, *tensor.along), part, RegionReaders(tensor.along))
        if shares:
            group.remember(found)
    return found


def leave(own: Tensor, group: TensorGroup, dim: int | None = None) -> Tensor:
    """The sum of what each rank has of its ``own``, which is used up.

    Args:
        own: of this rank.
        group: the ranks.
        dim: along which the sum is split; ``None``: all have it.
    """
    group.forget(Entered)
    if dim is None:
        return functions.add_up(own, group)
    lengths = even_lengths(own.shape[dim], group.size)
    return SplitTensor.from_part(functions.scatter_sum(own, group, dim, lengths), group, dim, lengths)


def as_computed(tensor: Tensor) -> Tensor:
    """In the dtype in which a product of matrices is computed: sums of gradients go over the wire in it."""
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
