"""Digests of what is written, taken on the way, so that each byte passes through the processor once.

What is read later need not be all of a file, so a stretch of it has a digest for each mebibyte. That is also what a
processor's cache holds: a piece is still there from being read or written when its digest is taken. The hash is XXH3 of
128 bits, which is several times as fast as memory is filled from a disk. It finds damage, not malice.
"""

from collections.abc import Iterator
from typing import BinaryIO, Final, final

import xxhash

from smp_strategy.checkpoint.storage.disk import EarlyWriting

__all__ = ["DIGITS", "PIECE", "DigestingFile", "digest", "pieces_of"]

DIGITS: Final = 32  # of a digest
PIECE: Final = 2**20  # bytes; in a file that has others, readers take them from there


def digest(data: bytes | bytearray | memoryview) -> str:
    """Of bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def pieces_of(length: int, piece: int = PIECE) -> Iterator[tuple[int, int]]:
    """Where the pieces of so many bytes begin and end."""
    for start in range(0, length, piece):
        yield start, min(start + piece, length)


@final
class DigestingFile:
    """A file to be written from its beginning to its end, as ``torch.save`` does, whose pieces' digests are kept.

    Args:
        file: open for writing, without a buffer of its own.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._early = file, EarlyWriting(file)
        self._small = bytearray()
        self.size = 0
        self.digests: list[str] = []
        """Of the pieces so far; complete after :meth:`end_stretch`."""

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
        """The digests of the pieces since the last call; the next piece begins here."""
        self._put_small()
        found, self.digests = self.digests, []
        return found

    def flush(self) -> None:
        """Nothing: ``torch.save`` calls it, and pieces are not to be smaller for that."""

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
