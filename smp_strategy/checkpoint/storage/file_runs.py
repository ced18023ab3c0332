"""Runs of elements of a file of weights: a rank that keeps a part of a tensor reads that part alone.

``safe_open`` reads whole tensors, also for a slice, and a mapped file has another disadvantage: its pages stay in the
resident set beside the tensors. So tensors are read by their places in the file. The format of safetensors names them:
eight bytes with the length of the header, the header as JSON, and row-major tensors behind it. For a file that
``torch.load`` has mapped, the mappings of the process do.
"""

import json
import os
import weakref
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from smp_strategy.checkpoint.storage.verified_reads import Files

__all__ = ["FileRuns"]

_MAPPINGS: Final = Path("/proc/self/maps")


@final
class FileRuns:
    """Open file, which is closed with the last reference to it: values are read much later.

    Args:
        path: File of weights.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = Files(path.parent)
        weakref.finalize(self, self._files.__exit__, None, None, None)

    def safetensors(self) -> dict[str, tuple[int, int]]:
        """Places of the tensors of a valid safetensors file: first byte, and number of bytes."""
        length = int.from_bytes(self._bytes(0, 8), "little")
        header = json.loads(self._bytes(8, length))
        header.pop("__metadata__", None)
        offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        return {name: (8 + length + start, stop - start) for name, (start, stop) in offsets.items()}

    def mapped(self, tensor: Tensor) -> int | None:
        """Place of the first byte of ``tensor``, which the file was mapped for; ``None``: the system does not tell."""
        address, name = tensor.data_ptr(), os.path.realpath(self._path)
        for line in _MAPPINGS.read_text().splitlines() if _MAPPINGS.exists() else ():
            addresses, _, offset, _, _, *path = line.split(maxsplit=5)
            start, stop = (int(each, 16) for each in addresses.split("-"))
            if start <= address < stop and path == [name]:
                return int(offset, 16) + address - start
        return None

    def read(self, place: int, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Elements from number ``start`` to ``stop`` of the tensor at ``place``, in new memory of one dim.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        values = torch.empty(stop - start, dtype=dtype, device="cpu")
        memory = values.view(torch.uint8).numpy().data
        self._files.read_into(self._path.name, place + start * dtype.itemsize, memory)
        return values

    def _bytes(self, offset: int, length: int) -> bytearray:
        found = bytearray(length)
        self._files.read_into(self._path.name, offset, memoryview(found))
        return found
