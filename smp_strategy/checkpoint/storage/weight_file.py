"""Files of weights: one of safetensors that is written tensor by tensor, and reads of a part of a tensor.

The safetensors library writes all tensors of a file in one call, so a process must have all of them. The format itself
does not ask for that: a header gives the place of each tensor, and the values follow. :class:`SafetensorsFile` writes
the header first and each tensor when it is there, in any order. The file is byte for byte the one that the library
writes.

Runs of elements of a file of weights: a rank that keeps a part of a tensor reads that part alone.

``safe_open`` reads whole tensors, also for a slice, and a mapped file has another disadvantage: its pages stay in the
resident set beside the tensors. So tensors are read by their places in the file. The format of safetensors names them:
eight bytes with the length of the header, the header as JSON, and row-major tensors behind it. For a file that
``torch.load`` has mapped, the mappings of the process do.
"""

import contextlib
import json
import math
import os
import struct
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from smp_strategy.checkpoint.storage.async_save import raw
from smp_strategy.checkpoint.storage.verified_reads import Files
from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.errors import UnsupportedError

__all__ = ["DTYPE_NAMES", "SafetensorsFile", "header_of", "FileRuns"]


# In the order in which the library puts tensors into a file, from the last to the first: by alignment, so that all
# values are aligned.
DTYPE_NAMES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_PRIORITIES: Final = {dtype: priority for priority, dtype in enumerate(DTYPE_NAMES)}


def header_of(
    tensors: Mapping[str, LocalTensorInfo], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int]]:
    """Header of a file, and the place of each tensor in the file.

    Args:
        tensors: Shapes and dtypes by name.
        metadata: Texts for the header.

    Raises:
        UnsupportedError: the format, or this package, does not know a dtype.
    """
    for name, (_, dtype) in tensors.items():
        if dtype not in DTYPE_NAMES:
            raise UnsupportedError(
                f"`{name}` has the dtype {dtype}, which cannot be written to safetensors here. Convert it first, or "
                "gather the model (`accelerator.get_state_dict(model)`) and save that."
            )
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    places, end = {}, 0
    # The order of names is that of their UTF-8 bytes.
    for name in sorted(tensors, key=lambda name: (-_PRIORITIES[tensors[name].dtype], name.encode())):
        shape, dtype = tensors[name]
        places[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [places[name], end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = struct.pack("<Q", len(text)) + text
    return content, {name: len(content) + place for name, place in places.items()}


@final
class SafetensorsFile:
    """A new file, open until :meth:`close`. A tensor that is not written is zero in it.

    Args:
        path: Path of the file, which must not exist.
        tensors: Shapes and dtypes of all tensors, by name.
        metadata: Texts for the header.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, LocalTensorInfo], metadata: Mapping[str, str] | None = None
    ) -> None:
        header, self._places = header_of(tensors, metadata)
        self._tensors = dict(tensors)
        size = len(header) + sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
        self._file = path.open("xb")
        try:
            self._file.write(header)
            self._file.truncate(size)
        except BaseException:
            with contextlib.suppress(OSError):  # it cannot write what is left of the header either
                self._file.close()
            raise

    def write(self, name: str, value: Tensor) -> None:
        assert (tuple(value.shape), value.dtype) == (tuple(self._tensors[name].shape), self._tensors[name].dtype), name
        if not value.numel():
            return
        self._file.seek(self._places[name])
        self._file.write(raw(value.detach().cpu().contiguous()))

    def close(self) -> None:
        self._file.close()


_MAPPINGS: Final = Path("/proc/self/maps")


@final
class FileRuns:
    """Open file, which is closed with the last reference to it: values are read much later."""

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
