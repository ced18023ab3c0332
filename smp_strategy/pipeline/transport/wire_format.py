"""Wire format of tensors: the elements in memory order, followed by the strides if they are not the predicted ones.

Both sides know size and dtype from the program, so there are no headers. Only the sender knows the strides of a
gradient, or of a result whose prediction is wrong about them. They matter: with another layout, even if only by gaps,
kernels add in another order. The receive buffer is preset with the predicted strides, so only others are sent.

The last elements overwrite a mark in the buffer, by which the receiver sees that the message has arrived.

Sending delays every value between stages, so the usual tensor, without gaps and with the predicted strides, takes few
calls and is not copied: its message shares its memory until one of the two is written to (copy on write).
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

__all__ = ["MARK", "Incoming", "bytes_of", "dense_strides", "on_host", "pack", "received_strides", "unpacked"]

MARK = b"\x96\xa5\x5a\xc3\x3c\x69\xf0\x0f"
"""Preset end of a receive buffer. A message that happens to end like this is merely not noticed early: its receiver
waits for it in the usual way."""


def pack(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Pack ``tensor``, of the size and dtype of ``spec``, into a contiguous message that later changes do not reach."""
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
    """Snapshot of ``elements``; copy-on-write if they fill their storage."""
    if elements.untyped_storage().nbytes() != elements.nbytes:
        return elements.clone()
    try:
        return elements._lazy_clone()
    except RuntimeError:  # the memory is not one of torch's own, but numpy's, say
        return elements.clone()


def on_host(spec: TensorSpec) -> TensorSpec:
    """``spec`` with the host as device; the same object if it is there already."""
    return spec if is_host(spec.device) else replace(spec, device=torch.device("cpu"))


def bytes_of(spec: TensorSpec) -> int:
    """Maximum number of bytes of a message with a tensor like ``spec``."""
    return spec.nbytes + len(spec.size) * torch.int64.itemsize


@final
class Incoming:
    """Receive buffer of one message.

    Args:
        memory: host memory of :func:`bytes_of` bytes.
        spec: expected metadata of the tensor, on the host as well.
    """

    def __init__(self, memory: Tensor, spec: TensorSpec) -> None:
        self._memory, self._spec = memory, spec
        self._layout = _layout(spec.size, spec.stride, spec.device)
        seen, end = memory.numpy(), spec.nbytes
        self._strides = seen[end:]
        self._strides[:] = memoryview(self._layout.ending)
        self._mark = MARK[:end]
        self._last = seen[end - len(self._mark) : end]
        self._last[:] = memoryview(self._mark)

    def is_there(self) -> bool:
        """Whether the last elements have arrived.

        The rest may be a moment behind, and elements equal to the mark are not noticed. So a wait is needed in any
        case; it is short if this returns true.
        """
        return self._last.tobytes() != self._mark

    def tensor(self) -> Tensor:
        """The tensor of the message, once it has arrived.

        Its layout has the gaps of the original; an expanded tensor becomes a dense one.
        """
        ending, strides = self._strides.tobytes(), self._spec.stride
        if ending != self._layout.ending:
            strides = struct.unpack_from(f"={len(self._spec.size)}q", ending)
        return unpacked(self._memory.untyped_storage(), self._spec, strides)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides that the elements of ``tensor`` have in a message: the same order in memory, without gaps."""
    return _layout(tensor.shape, tensor.stride(), tensor.device).dense


def received_strides(spec: TensorSpec, strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides of a tensor like ``spec`` whose original has ``strides``: in a message, and after it has arrived."""
    layout = _layout(spec.size, tuple(strides), torch.device("cpu"))
    return layout.dense, layout.dense if layout.gaps is None else layout.gaps


def unpacked(memory: torch.UntypedStorage, spec: TensorSpec, strides: Sequence[int]) -> Tensor:
    """Make a tensor like ``spec`` of the elements in ``memory``, with the layout of an original with ``strides``."""
    layout = _layout(spec.size, tuple(strides), spec.device)
    with outside_inference_mode():
        elements = torch.empty(0, dtype=spec.dtype, device=spec.device)
        # Not a view of bytes, for autograd.
        elements.set_(memory, 0, spec.size, layout.dense)
        if layout.gaps is None:
            return elements
        return torch.empty_strided(spec.size, layout.gaps, dtype=spec.dtype, device=spec.device).copy_(elements)


class _Layout(NamedTuple):
    """Memory layout of a tensor."""

    tail: Tensor
    """Strides as bytes."""
    ending: bytes
    """The same bytes, for comparison on the host."""
    dense: tuple[int, ...]
    """Strides without gaps, with the dims in the same order."""
    is_dense: bool
    """Whether the tensor has these strides."""
    gaps: tuple[int, ...] | None
    """Strides of a tensor with gaps; ``None`` if it is dense or expanded."""


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
