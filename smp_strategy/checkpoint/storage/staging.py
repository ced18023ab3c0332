"""Staging buffers: host copies of the tensors to be written, in memory that is reused by the next save.

Memory that a process gets for the first time is filled with zeros by the system, page by page, which takes longer than
copying.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from smp_strategy.distributed.device import is_host, wait_for_all

__all__ = ["StagingBuffers", "in_host_memory", "raw"]

_ALIGNMENT: Final = 64  # bytes


@final
class StagingBuffers:
    """Host memory for copies of tensors of given shapes.

    Args:
        like: Tensors of these shapes and dtypes. If one is on an accelerator, the memory is pinned, where possible.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        starts, size = [], 0
        for tensor in like:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = _memory(size, is_pinned=any(not is_host(tensor.device) for tensor in like))
        self._copies = [
            torch.from_numpy(memory[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, like, strict=True)
        ]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the buffers have the shapes and dtypes of ``tensors``."""
        return len(tensors) == len(self._copies) and all(
            copy.shape == tensor.shape and copy.dtype == tensor.dtype
            for copy, tensor in zip(self._copies, tensors, strict=True)
        )

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy the values of ``tensors``, which may be changed afterwards."""
        devices = set()
        # torch's copy reads the memory that it overwrites, memmove does not; but torch's may use several threads.
        alone = torch.get_num_threads() == 1
        for copy, tensor in zip(self._copies, tensors, strict=True):
            if alone and _is_plain(tensor):
                ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            else:
                copy.copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
        for device in devices:
            wait_for_all(device)
        return self._copies


def in_host_memory(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous in host memory, else a copy that is."""
    tensor = tensor.detach()
    return tensor if _is_plain(tensor) else tensor.cpu().resolve_conj().resolve_neg().contiguous()


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that is contiguous in host memory, to be read or written."""
    if not tensor.nbytes:
        return memoryview(b"")
    # By address: a storage that numpy has seen cannot be resized to 0 any more, which shards need.
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # keeps the memory alive as long as the view
    return memoryview(array).cast("B")


def _is_plain(tensor: Tensor) -> bool:
    return is_host(tensor.device) and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _memory(size: int, *, is_pinned: bool) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    if is_pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError:  # not enough pinned memory; the copy is slower then
            pass
    return np.empty(size, dtype=np.uint8)
