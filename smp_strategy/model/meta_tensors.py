"""Tensors that leave the meta device and stay what they are.

A tensor without memory cannot get some by an exchange of its ``data``, because the device is another one. But whoever
has seen the tensor (an optimizer, a tied module, a recurrent layer with its weak references) must go on with the same
object, with its class, attributes, hooks and ``requires_grad``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["has_unset", "leave_meta", "ordinary", "unset", "without_memory", "zero_values"]


@contextmanager
def ordinary() -> Iterator[None]:
    """What is made in here is an ordinary tensor, also where the first step is one of evaluation."""
    with torch.inference_mode(False), torch.no_grad():
        yield


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


@contextmanager
def zero_values(tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """In here ``tensors`` are zero on ``device``; parameters have no more memory than one element."""
    values = {}
    with ordinary():
        for tensor in tensors:
            # Others may be changed in place.
            size = () if isinstance(tensor, nn.Parameter) else tensor.shape
            values[tensor] = torch.zeros(size, dtype=tensor.dtype, device=device).expand(tensor.shape)
            leave_meta(tensor, values[tensor])
    try:
        yield
    finally:
        with ordinary():
            for tensor, value in values.items():
                leave_meta(tensor, value)  # which is what it was before


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1
