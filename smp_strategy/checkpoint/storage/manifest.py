"""Manifest of a checkpoint folder (``manifest.json``): the digests of all of its bytes.

Every file is a sequence of *regions*. A region is a tensor or a part of it, an object, or a whole file that is none of
PyTorch's (``meta.pt``, ``.metadata``). It has three stretches: the bytes before the values, the values, and the bytes
behind; each of them is digested in pieces. So damage is found and named, a part of a tensor can be verified without the
rest, and its values are found without parsing the region. The manifest ends with its own digest.

XXH3-128 checksums, taken while bytes are written, so that each byte passes through the processor once.

A reader need not read all of a file, so a stretch of it has a digest for each mebibyte. A mebibyte also fits in a
processor's cache: a piece is still there from being read or written when its digest is taken. XXH3 is several times as
fast as memory is filled from a disk. It finds damage, not malice.

Syncing files to disk, begun while they are still being written, so that less is left to wait for.
"""

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Final, final

import xxhash

from smp_strategy.errors import CheckpointError

__all__ = [
    "FILE_NAME",
    "Manifest",
    "Region",
    "is_plain_name",
    "DIGITS",
    "PIECE",
    "DigestingFile",
    "digest",
    "pieces_of",
    "to_disk",
]


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
    """File written from beginning to end, as ``torch.save`` does, with a digest for each piece."""

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
    """Asks the system, from time to time, to begin writing a file to disk. Guarantees nothing: see :func:`to_disk`."""

    def __init__(self, file: BinaryIO) -> None:
        self._number, self._begun = -1, 0
        self._begin = _system_call()
        try:
            self._number = file.fileno()
        except (OSError, AttributeError):  # of another storage
            self._begin = None

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


FILE_NAME: Final = "manifest.json"
FORMAT: Final = "smp_strategy sharded checkpoint"
VERSION: Final = 1
LARGEST_PIECE: Final = 2**30  # bytes: readers allocate memory for one piece

_END: Final = b',\n"digest": "'
_LAST: Final = b'"}\n'


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Stretch of a file that has one tensor, object or file."""

    name: str
    """Name of the tensor, object or file."""
    offset: int
    """Bytes before it in the file."""
    before: int
    """Bytes before the values."""
    values: int
    """Bytes of the values: a row-major array."""
    behind: int
    """Bytes behind the values."""
    digests: tuple[str, ...]
    """Digests of the pieces of the three stretches, one after the other."""

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.before + self.values + self.behind

    def pieces(self, piece: int = PIECE) -> list[tuple[int, int]]:
        """Begin and end of each piece in the file, in the order of the digests."""
        found, start = [], self.offset
        for length in (self.before, self.values, self.behind):
            found += [(start + begin, start + end) for begin, end in pieces_of(length, piece)]
            start += length
        return found

    def changed(self, read: Callable[[int, int], bytes | memoryview], piece: int = PIECE) -> Iterator[tuple[int, int]]:
        """Begin and end of each piece that differs from its digest; ``read`` gives the bytes between two offsets."""
        for (start, stop), expected in zip(self.pieces(piece), self.digests, strict=True):
            if digest(read(start, stop)) != expected:
                yield start, stop


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Digests and note of a checkpoint folder."""

    note: Mapping[str, Any]
    """Description by the writer: layout, step."""
    files: Mapping[str, tuple[Region, ...]]
    """Regions of each file, without gaps."""
    piece: int = PIECE
    """Bytes that have one digest."""

    def to_bytes(self) -> bytes:
        """Content of the manifest file."""
        files = {
            name: [[each.name, each.before, each.values, each.behind, "".join(each.digests)] for each in regions]
            for name, regions in self.files.items()
        }
        content = {"format": FORMAT, "version": VERSION, "note": dict(self.note), "piece": self.piece, "files": files}
        text = json.dumps(content).removesuffix("}").encode()
        return text + _END + digest(text).encode() + _LAST

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parse the content of a manifest file.

        Raises:
            CheckpointError: it is damaged, or of a later version.
        """
        text, found, end = data.rpartition(_END)
        if not found or end != digest(text).encode() + _LAST:
            raise CheckpointError(f"{FILE_NAME} is damaged: it does not end with its own digest.")
        try:
            content = json.loads(text + b"}")
            if content["format"] != FORMAT or content["version"] != VERSION:
                raise CheckpointError(
                    f"{FILE_NAME} is of version {content['version']!r} of the format {content['format']!r}, and this "
                    f"is version {VERSION} of {FORMAT!r}. Read it with a newer smp_strategy."
                )
            files = {name: _regions(name, rows) for name, rows in content["files"].items()}
            piece = content["piece"]
            if type(piece) is not int or piece not in range(1, LARGEST_PIECE + 1):
                raise ValueError(f"pieces of {piece!r} bytes")
            if not isinstance(content["note"], dict):
                raise ValueError("no note")
            for name, regions in files.items():
                if any(len(each.pieces(piece)) != len(each.digests) for each in regions):
                    raise ValueError(f"the digests of {name!r} are not as many as its pieces")
            return cls(note=content["note"], files=files, piece=piece)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{FILE_NAME} is not one: {type(error).__name__}: {error}") from error


def _regions(file: str, rows: list[list[Any]]) -> tuple[Region, ...]:
    if not is_plain_name(file):
        raise ValueError(f"{file!r} is not the name of a file in the directory")
    regions, offset = [], 0
    for name, before, values, behind, digests in rows:
        if not (isinstance(name, str) and all(type(each) is int and each >= 0 for each in (before, values, behind))):
            raise ValueError(f"a region of {file!r} is {[name, before, values, behind]}")
        parts = tuple(digests[start : start + DIGITS] for start in range(0, len(digests), DIGITS))
        if len(digests) % DIGITS:
            raise ValueError(f"the digests of {name!r} are cut off")
        regions.append(Region(name=name, offset=offset, before=before, values=values, behind=behind, digests=parts))
        offset += regions[-1].length
    return tuple(regions)


def is_plain_name(name: object) -> bool:
    """Whether ``name`` is the name of a file in a folder, and not a path out of it."""
    return (
        isinstance(name, str) and name not in ("", ".", "..") and PurePosixPath(name).name == name and "\0" not in name
    )
