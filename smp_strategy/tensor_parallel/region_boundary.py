"""Boundary of a split region: inputs get their gradients all-reduced, outputs are summed over the ranks.

Inside a region each rank computes something else, so the gradient of every input must be summed. If several layers of a
region read the same tensor (queries, keys and values), one sum is enough: the last input is remembered together with
its copy until the region ends.

A split input is gathered, and its gradient is reduce-scattered. Keeping the gathered tensor for the weight gradients
would cost the memory that splitting saves. So a rank keeps its part, and backward gathers again when the first of these
layers needs the whole (:class:`RegionReaders`).
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
    """Layers that need the gathered input again in backward.

    Args:
        along: How the input is split.

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
