"""Tensors as messages: the elements in the order in which they stand in memory, behind them the strides, and a zero.

Both sides know size and dtype from the program, so there are no headers. The strides of a gradient, or of a result
whose prediction is wrong about them, are known to the sender alone, and they matter: where the layout is another, be it
by gaps, kernels add in another order.

The zero at the end overwrites a mark in the memory that waits for the message, so its receiver can see that the message
is there.

Sending is on the way of every value from stage to stage, so the usual tensor, one without gaps and with the strides
that were predicted, takes few calls.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from smp_strategy.accelerator import is_host
from smp_strategy.pipeline.modes import outside_inference_mode
from smp_strategy.trace.spec import TensorSpec

__all__ = ["bytes_of", "on_host", "pack", "unpack", "watched"]

_MARK = 1


def pack(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """The message with ``tensor``, of the size and dtype of ``spec``: a copy, which does not follow later changes."""
    tensor = tensor.detach()
    if tensor.dtype != spec.dtype:
        tensor = tensor.to(spec.dtype)
    layout = _layout(tensor.shape, tensor.stride(), tensor.device)
    if not layout.is_dense or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty_strided(tensor.shape, layout.dense, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    elements = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return torch.cat((elements, layout.tail))


def on_host(spec: TensorSpec) -> TensorSpec:
    """``spec`` of a tensor in the host's memory; itself, if it is."""
    return spec if is_host(spec.device) else replace(spec, device=torch.device("cpu"))


def bytes_of(spec: TensorSpec) -> int:
    """How many the message with a tensor like ``spec`` has."""
    return spec.nbytes + len(spec.size) * torch.int64.itemsize + 1


def watched(memory: Tensor) -> Callable[[], bool]:
    """Mark ``memory`` of the host, into which a message will come; returns what tells whether its end is there.

    The rest may be a moment behind: this says that a wait will be short, and does not replace it.
    """
    seen = memory.numpy()
    seen[-1] = _MARK
    return lambda: bool(seen[-1] != _MARK)


def unpack(message: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor in ``message``, which is in the host's memory, as is what ``spec`` describes.

    It has its gaps; one that was expanded takes the memory that it seems to take.
    """
    layout = _layout(spec.size, spec.stride, spec.device)
    ending = message.numpy()[spec.nbytes :].tobytes()
    if ending != layout.ending:
        layout = _layout(spec.size, struct.unpack_from(f"={len(spec.size)}q", ending), spec.device)
    with outside_inference_mode():
        elements = torch.empty(0, dtype=spec.dtype, device=spec.device)
        # Not a view of bytes, for autograd.
        elements.set_(message.untyped_storage(), 0, spec.size, layout.dense)
        if layout.gaps is None:
            return elements
        return torch.empty_strided(spec.size, layout.gaps, dtype=spec.dtype, device=spec.device).copy_(elements)


class _Layout(NamedTuple):
    """How a tensor stands in memory."""

    tail: Tensor
    """The strides as bytes, and the zero."""
    ending: bytes
    """The same, for comparison on the host."""
    dense: tuple[int, ...]
    """The strides of elements that stand as close as they can in the same order."""
    is_dense: bool
    """Whether they do."""
    gaps: tuple[int, ...] | None
    """The strides, where elements have places of their own that do not stand so close."""


@functools.lru_cache(maxsize=1024)
def _layout(size: Sequence[int], strides: Sequence[int], device: torch.device) -> _Layout:
    with outside_inference_mode():
        strided = torch.empty_strided(size, strides, device="meta")
        dense = torch.empty_like(strided).stride()
        ending = struct.pack(f"={len(strides)}q", *strides) + b"\0"
        tail = torch.tensor(list(ending), dtype=torch.uint8, device=device)
    is_dense = dense == tuple(strides)
    is_expanded = 0 in [stride for stride, n in zip(strides, size, strict=True) if n > 1]
    return _Layout(tail, ending, dense, is_dense, None if is_dense or is_expanded else tuple(strides))
