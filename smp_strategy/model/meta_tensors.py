"""Materialise meta tensors in place: they get memory and keep identity, class, attributes and hooks.

Assigning ``data`` cannot give memory to a meta tensor, because the device differs. Optimizers, tied modules and
recurrent layers (by weak references) hold the object itself, so its implementation is swapped instead.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smp_strategy.distributed.torch_private import swap_contents

__all__ = ["has_unset", "leave_meta", "ordinary", "unset", "without_memory", "zero_values"]


@contextmanager
def ordinary() -> Iterator[None]:
    """Tensors made in here are no inference tensors, even if the first step is one of evaluation."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def leave_meta(tensor: Tensor, values: Tensor) -> None:
    """Give ``tensor`` the memory of ``values``, to which there must be no other reference."""
    values.requires_grad_(tensor.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(values, hooks, getattr(tensor, hooks))
    # The last step of `torch.utils.swap_tensors`, which exchanges class and attributes as well, and refuses tensors
    # with weak references. Here references, weak ones too, must keep meaning the same object.
    swap_contents(tensor, values)


def unset(tensor: Tensor, device: torch.device, *, marks: bool = True) -> Tensor:
    """Memory for ``tensor``; with ``marks`` filled with NaN where the dtype has it, so that gaps can be found."""
    values = torch.empty_like(tensor, device=device, requires_grad=False)
    if not marks:
        return values
    return values.fill_(torch.nan) if _can_be_nan(values) else values.zero_()


def has_unset(tensor: Tensor) -> bool:
    """Whether a part of ``tensor`` is still unset; ``False`` for dtypes without NaN."""
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
            # Buffers may be changed in place, so each element needs memory of its own.
            size = () if isinstance(tensor, nn.Parameter) else tensor.shape
            values[tensor] = torch.zeros(size, dtype=tensor.dtype, device=device).expand(tensor.shape)
            leave_meta(tensor, values[tensor])
    try:
        yield
    finally:
        with ordinary():
            for tensor, value in values.items():
                leave_meta(tensor, value)  # `value` has been the meta tensor since the first swap


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1
