"""Tensors as messages: the elements in the order in which they stand in memory, and behind them the strides.

The receiver knows size and dtype, but predictions can be wrong about strides. Sending is on the way of every value from
stage to stage, so the usual tensor, one without gaps and with the strides that were predicted, takes few calls.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from smp_strategy.trace.spec import TensorSpec

__all__ = ["empty", "pack", "unpack"]


def pack(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """The message with ``tensor``, of the size and dtype of ``spec``: a copy, which does not follow later changes."""
    tensor, strides = tensor.detach().to(spec.dtype), tensor.stride()
    dense = _without_gaps(tensor.shape, strides)
    if dense != strides or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty_strided(tensor.shape, dense, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    elements = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return torch.cat((elements, _as_bytes(strides, tensor.device)))


def empty(spec: TensorSpec) -> Tensor:
    """Memory for the message with a tensor like ``spec``."""
    return torch.empty(spec.nbytes + len(spec.size) * torch.int64.itemsize, dtype=torch.uint8, device=spec.device)


def unpack(message: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor in ``message``, with its gaps; one that was expanded takes the memory that it seems to take."""
    tail, strides = message[spec.nbytes :], tuple(spec.stride)
    if not torch.equal(tail, _as_bytes(strides, spec.device)):
        strides = tuple(tail.clone().view(torch.int64).tolist())
    dense = _without_gaps(spec.size, strides)
    with torch.inference_mode(False):
        elements = torch.empty(0, dtype=spec.dtype, device=spec.device)
        # Not a view of bytes, for autograd.
        elements.set_(message.untyped_storage(), 0, spec.size, dense)
        is_expanded = any(stride == 0 and size > 1 for stride, size in zip(strides, spec.size, strict=True))
        if is_expanded or dense == strides:
            return elements
        return torch.empty_strided(spec.size, strides, dtype=spec.dtype, device=spec.device).copy_(elements)


@functools.lru_cache(maxsize=1024)
def _without_gaps(size: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of elements that stand as close as they can in the order that ``strides`` give them."""
    strided = torch.empty_strided(size, strides, device="meta")
    return torch.empty_like(strided).stride()


@functools.lru_cache(maxsize=1024)
def _as_bytes(strides: Sequence[int], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(strides, dtype=torch.int64, device=device).view(torch.uint8)
