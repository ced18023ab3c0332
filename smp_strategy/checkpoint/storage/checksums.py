"""XXH3-128 checksums, taken while bytes are written, so that each byte passes through the processor once.

A reader need not read all of a file, so a stretch of it has a digest for each mebibyte. A mebibyte also fits in a
processor's cache: a piece is still there from being read or written when its digest is taken. XXH3 is several times as
fast as memory is filled from a disk. It finds damage, not malice.

Syncing files to disk, begun while they are still being written, so that less is left to wait for.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final, final

import xxhash

__all__ = ["DIGITS", "PIECE", "DigestingFile", "digest", "pieces_of", "to_disk"]


DIGITS: Final = 32  # hexadecimal digits of a digest
PIECE: Final = 2**20  # bytes; the manifest has the size that its writer used


def digest(data: bytes | bytearray | memoryview) -> str:
    """XXH3-128 of the bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def pieces_of(length: int, piece: int = PIECE) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece of ``length`` bytes."""
    for start in range(0, length, piece):
        yield start, min(start + piece, length)


@final
class DigestingFile:
    """File written from beginning to end, as ``torch.save`` does, with a digest for each piece.

    Args:
        file: Open for writing, unbuffered.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._early = file, EarlyWriting(file)
        self._small = bytearray()
        self.size = 0
        self.digests: list[str] = []
        """Digests of the pieces so far; complete after :meth:`end_stretch`."""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes to the current stretch."""
        rest = memoryview(data).cast("B")
        length = len(rest)
        while len(rest):
            if not self._small and len(rest) >= PIECE:
                self._put(rest[:PIECE])
                rest = rest[PIECE:]
                continue
            room = PIECE - len(self._small)
            self._small += rest[:room]
            rest = rest[room:]
            if len(self._small) == PIECE:
                self._put_small()
        return length

    def end_stretch(self) -> list[str]:
        """Digests of the pieces since the last call; the next piece begins here."""
        self._put_small()
        found, self.digests = self.digests, []
        return found

    def flush(self) -> None:
        """Does nothing: ``torch.save`` calls it, and that must not make pieces smaller."""

    def _put_small(self) -> None:
        if self._small:
            self._put(memoryview(self._small))
            self._small = bytearray()

    def _put(self, piece: memoryview) -> None:
        rest = piece
        while len(rest):
            rest = rest[self._file.write(rest) :]
        self.digests.append(digest(piece))
        self.size += len(piece)
        self._early.is_at(self.size)


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
