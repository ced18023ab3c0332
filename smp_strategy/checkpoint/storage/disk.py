"""Bringing a file to the disk, which begins while it is still being written: then less is left to wait for."""

import ctypes
import os
from collections.abc import Callable
from typing import BinaryIO, Final, final

__all__ = ["EarlyWriting", "to_disk"]

_STEP: Final = 16 * 2**20  # bytes
_WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE: begin, and do not wait


def to_disk(file: BinaryIO) -> None:
    """Until what was written to ``file`` is there after a loss of power."""
    file.flush()
    os.fsync(file.fileno())


@final
class EarlyWriting:
    """Lets the system begin with what there is of a file, now and then. It promises nothing: see :func:`to_disk`.

    Args:
        file: written from its beginning to its end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._number = file.fileno()
        self._begun = 0
        self._begin = _system_call()

    def is_at(self, size: int) -> None:
        """There are ``size`` bytes now."""
        if self._begin is not None and size - self._begun >= _STEP:
            self._begin(self._number, self._begun, size - self._begun, _WRITE)
            self._begun = size


def _system_call() -> Callable[[int, int, int, int], object] | None:
    """Linux has it, and Python does not."""
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found
