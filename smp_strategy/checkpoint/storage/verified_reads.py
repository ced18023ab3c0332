"""Verified reads: bytes of a checkpoint folder are compared with their digests as they are read."""

import io
import os
from pathlib import Path
from types import TracebackType
from typing import final

from smp_strategy.checkpoint.storage.checksums import digest
from smp_strategy.checkpoint.storage.manifest import Region
from smp_strategy.errors import CheckpointError

__all__ = ["DamageError", "FileSlice", "Files", "RegionReader"]


class DamageError(CheckpointError):
    """A checkpoint has changed since it was written; another one may be intact."""


@final
class Files:
    """Files of a folder, opened on demand; a context manager that closes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, int] = {}

    def __enter__(self) -> "Files":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._open.values():
            os.close(number)
        self._open.clear()

    def size(self, file: str) -> int:
        """Number of bytes of a file."""
        return os.fstat(self._number(file)).st_size

    def read_into(self, file: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of a file from ``offset`` on.

        Raises:
            DamageError: it has fewer, or cannot be read.
        """
        rest = memory
        while len(rest):
            try:
                count = os.preadv(self._number(file), [rest], offset)
            except OSError as error:
                raise DamageError(f"{self.directory / file} cannot be read: {error}") from error
            if not count:
                raise DamageError(
                    f"{self.directory / file} ends after {self.size(file)} bytes, but should have more: it is damaged."
                )
            rest, offset = rest[count:], offset + count

    def _number(self, file: str) -> int:
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise DamageError(f"{path}, a part of the checkpoint, cannot be read: {error}") from error
        return self._open[file]


@final
class RegionReader:
    """Reader of the values of one region. Verifies each piece once, and the bytes around the values at the beginning.

    Args:
        files: Files of the folder.
        file: Name of the file that has the region.
        region: Region, from the manifest.
        piece: Bytes that have one digest.
        scratch: Memory for at least one piece.
    """

    def __init__(self, files: Files, file: str, region: Region, piece: int, scratch: memoryview) -> None:
        self._files, self._file, self._region, self._piece = files, file, region, piece
        self._scratch = scratch
        self._num_before = -(-region.before // piece)
        self._verified: set[int] = set()
        for number, (start, stop) in enumerate(region.pieces(piece)):
            if stop <= region.offset + region.before or start >= region.offset + region.before + region.values:
                memory = scratch[: stop - start]
                files.read_into(file, start, memory)
                self._verify(memory, number)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of the values from ``start`` on.

        Raises:
            DamageError: they are damaged.
        """
        piece, stop, position = self._piece, start + len(memory), start
        first = self._region.offset + self._region.before
        while position < stop:
            number = position // piece
            begin, end = number * piece, min((number + 1) * piece, self._region.values)
            until = min(stop, end)
            wanted = memory[position - start : until - start]
            number += self._num_before
            if number in self._verified:
                self._files.read_into(self._file, first + position, wanted)
            elif (position, until) == (begin, end):
                self._files.read_into(self._file, first + begin, wanted)
                self._verify(wanted, number)
            else:
                whole = self._scratch[: end - begin]
                self._files.read_into(self._file, first + begin, whole)
                self._verify(whole, number)
                wanted[:] = whole[position - begin : until - begin]
            position = until

    def _verify(self, memory: memoryview, number: int) -> None:
        region = self._region
        if digest(memory) != region.digests[number]:
            start, stop = region.pieces(self._piece)[number]
            raise DamageError(
                f"{self._files.directory / self._file} is damaged: bytes {start} to {stop}, of `{region.name}`, have "
                "changed since they were written."
            )
        self._verified.add(number)


@final
class FileSlice(io.RawIOBase):
    """Stretch of a file as a file object of its own."""

    def __init__(self, files: Files, file: str, offset: int, length: int) -> None:
        self._files, self._file, self._offset, self._length = files, file, offset, length
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        """Implements :class:`io.RawIOBase`."""
        memory = memoryview(buffer).cast("B")
        memory = memory[: max(0, self._length - self._position)]
        self._files.read_into(self._file, self._offset + self._position, memory)
        self._position += len(memory)
        return len(memory)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Implements :class:`io.RawIOBase`."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Implements :class:`io.RawIOBase`."""
        return self._position
