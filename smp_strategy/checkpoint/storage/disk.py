"""Syncing files to disk, begun while they are still being written, so that less is left to wait for."""

import ctypes
import os
from collections.abc import Callable
from typing import BinaryIO, Final, final

__all__ = ["EarlyWriting", "to_disk"]

_STEP: Final = 16 * 2**20  # bytes
_WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE: begin writing, do not wait


def to_disk(file: BinaryIO) -> None:
    """Wait until the bytes written to ``file`` survive a loss of power."""
    file.flush()
    os.fsync(file.fileno())


@final
class EarlyWriting:
    """Asks the system, from time to time, to begin writing a file to disk. Guarantees nothing: see :func:`to_disk`.

    Args:
        file: Written from beginning to end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._number = file.fileno()
        self._begun = 0
        self._begin = _system_call()

    def is_at(self, size: int) -> None:
        """Report that the file has ``size`` bytes now."""
        if self._begin is not None and size - self._begun >= _STEP:
            self._begin(self._number, self._begun, size - self._begun, _WRITE)
            self._begun = size


def _system_call() -> Callable[[int, int, int, int], object] | None:
    """The Linux call ``sync_file_range``, which Python does not have; ``None`` on other systems."""
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found
