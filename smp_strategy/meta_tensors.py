"""Tensors that leave the meta device and stay what they are.

A tensor without memory cannot get some by an exchange of its ``data``, because the device is another one. But whoever
has seen the tensor (an optimizer, a tied module, a recurrent layer with its weak references) must go on with the same
object, with its class, attributes, hooks and ``requires_grad``.
"""

import torch
from torch import Tensor

__all__ = ["has_unset", "leave_meta", "unset", "without_memory"]


def leave_meta(tensor: Tensor, values: Tensor) -> None:
    """Let ``tensor`` be ``values``, which nobody else has."""
    values.requires_grad_(tensor.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(values, hooks, getattr(tensor, hooks))
    # What `torch.utils.swap_tensors` does in the end. It exchanges class and attributes as well, and refuses tensors
    # with weak references, which here shall go on standing for the same object.
    torch._C._swap_tensor_impl(tensor, values)


def unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for ``tensor`` in which it can be seen what has not been filled."""
    values = torch.empty_like(tensor, device=device, requires_grad=False)
    return values.fill_(torch.nan) if _can_be_nan(values) else values.zero_()


def has_unset(tensor: Tensor) -> bool:
    """Whether a part of it has not been filled, as far as can be seen."""
    # `amin` passes NaN on and needs no memory.
    return _can_be_nan(tensor) and tensor.numel() > 0 and bool(tensor.detach().amin().isnan())


def without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor like ``tensor``, strides included, that has no memory on ``device``."""
    values = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    values.untyped_storage().resize_(0)
    return values


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1
