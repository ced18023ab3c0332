"""Verified reads: bytes of a checkpoint folder are compared with their digests as they are read.

Damage report of a folder with a manifest: the bytes that have changed, and the tensors that they belong to.

Digests for folders whose files are defined by other programs: a ``manifest.json`` beside them.

The manifest is that of a sharded folder (:mod:`smp_strategy.checkpoint.storage.manifest`), made afterwards for existing
files of any kind. For safetensors it has a region for each tensor, so that damage is reported with the tensor's name.
"""

import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, final

from smp_strategy.checkpoint.storage import manifest
from smp_strategy.checkpoint.storage.manifest import FILE_NAME, PIECE, Manifest, Region, digest, pieces_of
from smp_strategy.checkpoint.storage.remote_path import AnyPath, RemoteFile
from smp_strategy.errors import CheckpointError

__all__ = ["DamageError", "FileSlice", "Files", "RegionReader", "Damage", "problems_of_files", "describe", "verify"]


class DamageError(CheckpointError):
    """A checkpoint has changed since it was written; another one may be intact."""


@final
class Files:
    """Files of a folder, opened on demand; a context manager that closes them."""

    def __init__(self, directory: AnyPath) -> None:
        self.directory = directory
        self._open: dict[str, LocalFile | RemoteFile] = {}

    def __enter__(self) -> "Files":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._open.values():
            opened.close()
        self._open.clear()

    def size(self, file: str) -> int:
        """Number of bytes of a file."""
        return self._opened(file).size

    def read_into(self, file: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of a file from ``offset`` on.

        Raises:
            DamageError: it has fewer, or cannot be read.
        """
        rest = memory
        while len(rest):
            try:
                count = self._opened(file).read_at(rest, offset)
            except OSError as error:
                raise DamageError(f"{self.directory / file} cannot be read: {error}") from error
            if not count:
                raise DamageError(
                    f"{self.directory / file} ends after {self.size(file)} bytes, but should have more: it is damaged."
                )
            rest, offset = rest[count:], offset + count

    def _opened(self, file: str) -> "LocalFile | RemoteFile":
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = LocalFile(path) if isinstance(path, Path) else path.opened()
            except OSError as error:
                raise DamageError(f"{path}, a part of the checkpoint, cannot be read: {error}") from error
        return self._open[file]


@final
class LocalFile:
    """File that is open for reading at any offset, with the methods of a :class:`RemoteFile`."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return os.fstat(self._number).st_size

    def read_at(self, memory: memoryview, offset: int) -> int:
        """Read to ``memory``; returns how many bytes were read, 0 at the end."""
        return os.preadv(self._number, [memory], offset)

    def close(self) -> None:
        os.close(self._number)


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
        return True

    def seekable(self) -> bool:
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


class Damage(NamedTuple):
    """One damaged stretch of a file."""

    file: str
    tensor: str
    """Name of the tensor, object or file that the bytes belong to; empty if not known."""
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor + ': ' if self.tensor else ''}{self.what}"


def problems_of_files(directory: AnyPath) -> list[Damage] | None:
    """Compare all bytes of a sharded folder with its manifest; ``None`` if it has no manifest."""
    try:
        found = Manifest.from_bytes((directory / manifest.FILE_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except (CheckpointError, OSError) as error:
        return [Damage(manifest.FILE_NAME, "", str(error))]
    problems: list[Damage] = []
    with Files(directory) as files:
        for file in found.files:
            try:
                problems += _problems_of_file(files, file, found)
            except CheckpointError as error:
                problems.append(Damage(file, "", str(error)))
    return problems


def _problems_of_file(files: Files, file: str, found: Manifest) -> Iterator[Damage]:
    regions, memory = found.files[file], memoryview(bytearray(found.piece))

    def read(start: int, stop: int) -> memoryview:
        files.read_into(file, start, memory[: stop - start])
        return memory[: stop - start]

    size, expected = files.size(file), sum(region.length for region in regions)
    if size > expected:
        yield Damage(file, "", f"has {size - expected} bytes too many.")
    for region in regions:
        if region.offset + region.length > size:
            yield Damage(file, region.name, f"is cut off: the file ends after {size} bytes, of {expected}.")
            continue
        if damaged := [f"{start} to {stop}" for start, stop in region.changed(read, found.piece)]:
            yield Damage(file, region.name, f"bytes {', '.join(damaged[:3])} have changed since they were written.")


_LENGTH: Final = 8  # bytes of the header's length in a safetensors file


def describe(folder: Path, note: dict[str, Any]) -> None:
    """Write the manifest of all files in ``folder``, not of subfolders. Must be the last write to the folder."""
    paths = sorted(each for each in folder.iterdir() if each.is_file() and each.name != FILE_NAME)
    files = {path.name: tuple(_regions(path)) for path in paths}
    (folder / FILE_NAME).write_bytes(Manifest(note=note, files=files).to_bytes())


def verify(folder: Path, names: Iterable[str] | None = None) -> None:
    """Compare files with the manifest, if there is one. Missing files are not reported here.

    Raises:
        CheckpointError: one is damaged; the message names the file, and the tensor where that is known.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return
    try:
        found = Manifest.from_bytes(path.read_bytes())
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    for name in found.files if names is None else [each for each in names if each in found.files]:
        if (folder / name).is_file():
            _verify_file(folder / name, found.files[name], found.piece)


def _verify_file(path: Path, regions: tuple[Region, ...], piece: int) -> None:
    remedy = (
        f"Load another checkpoint. If the file was changed on purpose, delete {path.with_name(FILE_NAME)}, and it is "
        "loaded as it is."
    )
    size, expected = path.stat().st_size, sum(region.length for region in regions)
    if size != expected:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, but {expected} when it was written. {remedy}")
    with path.open("rb") as file:
        for region in regions:
            # Regions and pieces follow each other without gaps, so reading on is reading from `start`.
            for start, stop in region.changed(lambda start, stop: file.read(stop - start), piece):
                what = "" if region.name == path.name else f" `{region.name}`, in"
                raise CheckpointError(
                    f"{path} is damaged:{what} bytes {start} to {stop} have changed since they were written. {remedy}"
                )


def _regions(path: Path) -> Iterator[Region]:
    offset = 0
    with path.open("rb") as file:
        for name, length in _stretches(path):
            digests = tuple(digest(file.read(stop - start)) for start, stop in pieces_of(length, PIECE))
            yield Region(name=name, offset=offset, before=0, values=length, behind=0, digests=digests)
            offset += length


def _stretches(path: Path) -> list[tuple[str, int]]:
    """Names and numbers of bytes of the consecutive parts of a file."""
    size = path.stat().st_size
    whole = [(path.name, size)]
    if path.suffix != ".safetensors" or size < _LENGTH:
        return whole
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            header = json.loads(file.read(length)) if length < size else {}
        spans = sorted((*entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError):  # no safetensors file, in spite of its name
        return whole
    stretches, end = [(path.name, _LENGTH + length)], 0
    for start, stop, name in spans:
        if start != end:
            return whole
        stretches, end = [*stretches, (name, stop - start)], stop
    return stretches if _LENGTH + length + end == size else whole
