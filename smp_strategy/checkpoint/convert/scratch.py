"""Room on the disk for tensors that are needed all at once, as if they were in memory.

PyTorch writes a file from tensors that are there. Those of a file that is mapped into memory are, though they take none
until they are used, and can be dropped again. Others are read into a file that is mapped as well, and has no name: it
goes with the process, however that ends.
"""

import mmap
import os
import tempfile
from collections.abc import Hashable
from pathlib import Path
from types import TracebackType
from typing import final

import torch
from torch import Tensor

from smp_strategy.checkpoint.convert.contents import LazyTensor

__all__ = ["Scratch"]


@final
class Scratch:
    """Reads tensors, each once, whatever the number of its names; a context manager.

    Args:
        folder: on the disk that has room.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._size = 0
        self._known: dict[Hashable, Tensor] = {}

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._known.clear()
        self._file.close()

    def tensor(self, lazy: LazyTensor) -> Tensor:
        """Its values; the same memory for tensors that share it."""
        if lazy.memory is None:
            return self._kept(lazy)
        key = (lazy.memory, lazy.dtype)
        if key not in self._known:
            self._known[key] = self._kept(lazy)
        return self._known[key]

    def _kept(self, lazy: LazyTensor) -> Tensor:
        values = lazy.read()
        if lazy.is_mapped or not values.numel() or values.layout != torch.strided:
            return values
        start = -(-self._size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._size = start + values.nbytes
        # With room for all of it: writing to memory that has none on the disk ends the process.
        os.posix_fallocate(self._file.fileno(), start, values.nbytes)
        memory = mmap.mmap(self._file.fileno(), values.nbytes, offset=start)
        kept = torch.frombuffer(memory, dtype=values.dtype).view(values.shape)
        return kept.copy_(values)
