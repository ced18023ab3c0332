"""Manifest of a checkpoint folder (``manifest.json``): the digests of all of its bytes.

Every file is a sequence of *regions*. A region is a tensor or a part of it, an object, or a whole file that is none of
PyTorch's (``meta.pt``, ``.metadata``). It has three stretches: the bytes before the values, the values, and the bytes
behind; each of them is digested in pieces. So damage is found and named, a part of a tensor can be verified without the
rest, and its values are found without parsing the region. The manifest ends with its own digest.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, final

from smp_strategy.checkpoint.storage.checksums import DIGITS, PIECE, digest, pieces_of
from smp_strategy.errors import CheckpointError

__all__ = ["FILE_NAME", "Manifest", "Region", "is_plain_name"]

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
