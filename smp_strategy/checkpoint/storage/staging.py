"""Staging buffers: host memory into which tensors are copied before a thread writes them to disk.

The system fills fresh memory with zeros, page by page, which takes longer than the copy itself; so buffers are kept
from one save to the next.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.host_copies import HostCopies

__all__ = ["StagingBuffers", "in_host_memory", "raw"]

_ALIGNMENT: Final = 64  # bytes


@final
class StagingBuffers:
    """Host memory for copies of tensors of given shapes.

    Args:
        like: Tensors of these shapes and dtypes. If one is on an accelerator, the memory is page-locked where possible.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        starts, size = [], 0
        for tensor in like:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._links: dict[torch.device, HostCopies] = {}
        self._connect(like)
        memory = _memory(size, self._links)
        self._copies = [
            torch.from_numpy(memory[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, like, strict=True)
        ]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors`` have the shapes and dtypes of these buffers."""
        return len(tensors) == len(self._copies) and all(
            copy.shape == tensor.shape and copy.dtype == tensor.dtype
            for copy, tensor in zip(self._copies, tensors, strict=True)
        )

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy the values of tensors, and wait for the copies; the tensors may be changed afterwards."""
        self._connect(tensors)
        under_way = []
        # torch's own copy reads what it overwrites, the C library's does not; but torch's may use several threads.
        alone = torch.get_num_threads() == 1
        for copy, tensor in zip(self._copies, tensors, strict=True):
            if alone and _is_plain(tensor):
                ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            else:
                link = self._links[tensor.device]
                under_way.append(link.store(tensor, copy, after=[link.now()]))
        for copied in under_way:
            copied.synchronize()
        return self._copies

    def _connect(self, tensors: Sequence[Tensor]) -> None:
        for device in {tensor.device for tensor in tensors} - self._links.keys():
            self._links[device] = HostCopies(device)


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


def _memory(size: int, links: Mapping[torch.device, HostCopies]) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    accelerator = next((link for device, link in links.items() if not is_host(device)), None)
    if accelerator is not None:
        try:
            return accelerator.memory(size).numpy()
        except RuntimeError:  # not so much memory can be page-locked; the copy takes longer then
            pass
    return np.empty(size, dtype=np.uint8)
