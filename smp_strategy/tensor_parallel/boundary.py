"""Where a split region begins and ends: whole values come in, and a sum of all ranks comes out.

Everything in between is a matter of each rank, so whatever comes in has a gradient that must be added up. Where several
layers of a region read the same tensor (queries, keys and values), one sum is enough for all of them: the tensor that
came in last is remembered together with its copy, until the region ends.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

from smp_strategy.tensor_parallel import functions
from smp_strategy.tensor_parallel.group import TensorGroup

__all__ = ["Entered", "as_computed", "enter", "leave"]


@final
class Entered(NamedTuple):
    """What came in last."""

    whole: Tensor
    version: int
    """Of ``whole`` when it came in: a later change in place makes it another value."""
    dtype: torch.dtype
    """In which layers read it: autocast begins and ends."""
    copied: Tensor


def enter(whole: Tensor, group: TensorGroup) -> Tensor:
    """``whole``, for layers of a region to read; they share one sum of its gradients."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return whole
    found, dtype = group.entered, _dtype_of(whole)
    if found is not None and found.whole is whole and (found.version, found.dtype) == (whole._version, dtype):
        return found.copied
    copied = functions.copy(as_computed(whole), group)
    group.entered = Entered(whole, whole._version, dtype, copied)
    return copied


def leave(own: Tensor, group: TensorGroup) -> Tensor:
    """The sum of what each rank has of its ``own``, which is used up."""
    group.entered = None
    return functions.add_up(own, group)


def as_computed(tensor: Tensor) -> Tensor:
    """In the dtype in which a product of matrices is computed: sums of gradients go over the wire in it."""
    dtype = _dtype_of(tensor)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _dtype_of(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype
