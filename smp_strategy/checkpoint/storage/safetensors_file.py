"""A safetensors file that is written one tensor at a time.

The safetensors library writes all tensors of a file in one call, so a process must have all of them. The format itself
does not ask for that: a header gives the place of each tensor, and the values follow. :class:`SafetensorsFile` writes
the header first and each tensor when it is there, in any order. The file is byte for byte the one that the library
writes.
"""

import contextlib
import ctypes
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.errors import UnsupportedError

__all__ = ["SafetensorsFile", "header_of"]

# In the order in which the library puts tensors into a file, from the last to the first: by alignment, so that all
# values are aligned.
_NAMES: Final = {
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
_PRIORITIES: Final = {dtype: priority for priority, dtype in enumerate(_NAMES)}


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
        if dtype not in _NAMES:
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
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [places[name], end]}
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
        """Write the values of the tensor ``name``."""
        assert (tuple(value.shape), value.dtype) == (tuple(self._tensors[name].shape), self._tensors[name].dtype), name
        if not value.numel():
            return
        values = value.detach().cpu().contiguous()
        self._file.seek(self._places[name])
        # Not through NumPy: its views forbid for ever that the memory of a parameter is resized.
        self._file.write((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
