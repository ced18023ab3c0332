"""XXH3-128 checksums, taken while bytes are written, so that each byte passes through the processor once.

A reader need not read all of a file, so a stretch of it has a digest for each mebibyte. A mebibyte also fits in a
processor's cache: a piece is still there from being read or written when its digest is taken. XXH3 is several times as
fast as memory is filled from a disk. It finds damage, not malice.
"""

from collections.abc import Iterator
from typing import BinaryIO, Final, final

import xxhash

from smp_strategy.checkpoint.storage.disk import EarlyWriting

__all__ = ["DIGITS", "PIECE", "DigestingFile", "digest", "pieces_of"]

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
