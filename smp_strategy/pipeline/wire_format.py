"""Tensors as messages: the elements in the order in which they stand in memory, and if need be the strides behind them.

Both sides know size and dtype from the program, so there are no headers. The strides of a gradient, or of a result
whose prediction is wrong about them, are known to the sender alone, and they matter: where the layout is another, be it
by gaps, kernels add in another order. The memory that waits for a message holds those that were predicted, so they are
sent only where they are others.

The last elements overwrite a mark in that memory, so the receiver can see that the message is there.

Sending is on the way of every value from stage to stage, so the usual tensor, one without gaps and with the strides
that were predicted, takes few calls and is not copied: its message shares its memory until one of the two is written to
(copy on write).
"""

import functools
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.torch_modes import outside_inference_mode
from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["Incoming", "bytes_of", "on_host", "pack"]

# Where a message ends like this, its receiver waits for it in the usual way.
_MARK = b"\x96\xa5\x5a\xc3\x3c\x69\xf0\x0f"


def pack(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """The message with ``tensor``, of the size and dtype of ``spec``; contiguous, and later changes do not reach it."""
    tensor = tensor.detach()
    if tensor.dtype != spec.dtype:
        tensor = tensor.to(spec.dtype)
    strides = tensor.stride()
    layout = _layout(tensor.shape, strides, tensor.device)
    if not layout.is_dense or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty_strided(tensor.shape, layout.dense, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    elements = tensor.as_strided((tensor.numel(),), (1,))
    # The copy to the host, which is still to come, reads the memory of an accelerator without regard to writes.
    if strides == spec.stride and spec.nbytes and is_host(tensor.device):
        return _frozen(elements)
    return torch.cat((elements.view(torch.uint8), layout.tail))


def _frozen(elements: Tensor) -> Tensor:
    """``elements`` as they are now: in the same memory, if they have it for themselves, until somebody writes to it."""
    if elements.untyped_storage().nbytes() != elements.nbytes:
        return elements.clone()
    try:
        return elements._lazy_clone()
    except RuntimeError:  # the memory is not one of torch's own, but numpy's, say
        return elements.clone()


def on_host(spec: TensorSpec) -> TensorSpec:
    """``spec`` of a tensor in the host's memory; itself, if it is."""
    return spec if is_host(spec.device) else replace(spec, device=torch.device("cpu"))


def bytes_of(spec: TensorSpec) -> int:
    """How many the message with a tensor like ``spec`` has at most."""
    return spec.nbytes + len(spec.size) * torch.int64.itemsize


@final
class Incoming:
    """Memory that waits for a message.

    Args:
        memory: of the host, as much as :func:`bytes_of` says.
        spec: what the tensor in the message is expected to be like, in the host's memory as well.
    """

    def __init__(self, memory: Tensor, spec: TensorSpec) -> None:
        self._memory, self._spec = memory, spec
        self._layout = _layout(spec.size, spec.stride, spec.device)
        seen, end = memory.numpy(), spec.nbytes
        self._strides = seen[end:]
        self._strides[:] = memoryview(self._layout.ending)
        self._mark = _MARK[:end]
        self._last = seen[end - len(self._mark) : end]
        self._last[:] = memoryview(self._mark)

    def is_there(self) -> bool:
        """Whether the last elements are there.

        The rest may be a moment behind, and they may look like what was there before: a wait will be short if this
        says so, and is needed in any case.
        """
        return self._last.tobytes() != self._mark

    def tensor(self) -> Tensor:
        """What was in the message, once it is there.

        It has its gaps; one that was expanded takes the memory that it seems to take.
        """
        spec, layout, ending = self._spec, self._layout, self._strides.tobytes()
        if ending != layout.ending:
            layout = _layout(spec.size, struct.unpack_from(f"={len(spec.size)}q", ending), spec.device)
        with outside_inference_mode():
            elements = torch.empty(0, dtype=spec.dtype, device=spec.device)
            # Not a view of bytes, for autograd.
            elements.set_(self._memory.untyped_storage(), 0, spec.size, layout.dense)
            if layout.gaps is None:
                return elements
            return torch.empty_strided(spec.size, layout.gaps, dtype=spec.dtype, device=spec.device).copy_(elements)


class _Layout(NamedTuple):
    """How a tensor stands in memory."""

    tail: Tensor
    """The strides as bytes."""
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
        ending = struct.pack(f"={len(strides)}q", *strides)
        tail = torch.tensor(list(ending), dtype=torch.uint8, device=device)
    is_dense = dense == tuple(strides)
    is_expanded = 0 in [stride for stride, n in zip(strides, size, strict=True) if n > 1]
    return _Layout(tail, ending, dense, is_dense, None if is_dense or is_expanded else tuple(strides))
