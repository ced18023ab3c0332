"""Paths of other storages, addresses such as ``s3://bucket/run/x.ckpt``, by ``fsspec``.

:class:`RemotePath` has those methods of :class:`pathlib.Path` that readers and writers of checkpoints use, so that they
are the same for folders of this machine and for addresses. A storage of objects knows no folders: one exists as long
as something is in it.

What another process has just written must be seen, so nothing is taken from listings that ``fsspec`` has kept. Errors
name the address; the file systems raise errors of many libraries, which become an :class:`OSError` here.
"""

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple, cast, final

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

from smp_strategy.errors import CheckpointError

__all__ = ["AnyPath", "RemoteFile", "RemotePath", "local_path", "any_path"]

# Bytes that are read beyond those that are asked for: readers go through a file from its beginning.
_READ_AHEAD: Final = 8 * 2**20
_ONLY_LIGHTNING: Final = (
    "and only Lightning's checkpoints are written to one and read there. Name a folder of this machine, and copy it."
)
# Errors that callers tell apart; all others become an `OSError`.
_TOLD_APART: Final = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


class RemoteStat(NamedTuple):
    """Size and time of an object, as :meth:`pathlib.Path.stat` names them."""

    st_size: int
    st_mtime: float
    """Seconds, by the clock of the storage."""

    @property
    def st_mtime_ns(self) -> int:
        """The same in nanoseconds."""
        return int(self.st_mtime * 1e9)


@final
@dataclass(frozen=True, order=True)
class RemotePath:
    """Address of an object, or of all objects below it.

    Args:
        url: With the protocol, without a slash at the end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot on."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "RemotePath":
        """The address without the last part."""
        return RemotePath(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether there is an object, or one below."""
        with self._fresh() as (system, path):
            return bool(system.exists(path))

    def is_file(self) -> bool:
        with self._fresh() as (system, path):
            return bool(system.isfile(path))

    def is_dir(self) -> bool:
        """Whether there is an object below."""
        with self._fresh() as (system, path):
            return bool(system.isdir(path))

    def is_symlink(self) -> bool:
        """False: there are no links."""
        return False

    def stat(self) -> RemoteStat:
        """Size and time of the object.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._fresh() as (system, path):
            size = system.info(path)["size"] or 0
            return RemoteStat(int(size), system.modified(path).timestamp())

    def iterdir(self) -> Iterator["RemotePath"]:
        """What is directly below, in the order of names."""
        with self._fresh() as (system, path):
            listed = system.ls(path, detail=False)
        # Some storages list the folder itself, as an empty object of its name, and an object is listed as itself.
        inside = [entry for entry in listed if entry.rstrip("/") != path.rstrip("/")]
        yield from (self / name for name in sorted({PurePosixPath(entry).name for entry in inside}))

    def rglob(self, pattern: str) -> list["RemotePath"]:
        """All objects below; ``pattern`` must be ``*``."""
        assert pattern == "*"
        with self._fresh() as (system, path):
            objects = system.find(path)
        # Paths begin with the bucket and not with the protocol; `find` of an object gives the object itself.
        start = len(path.rstrip("/")) + 1
        return [self / inner[start:] for inner in sorted(objects) if len(inner) > start]

    def read_bytes(self) -> bytes:
        """Content of the object."""
        with self._fresh() as (system, path):
            return bytes(system.cat_file(path))

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[BinaryIO]:
        """The object as a file, read in ranges, or written in parts: it is there when the context ends."""
        with self._fresh() as (system, path):
            if mode == "rb":
                file = system.open(path, mode, block_size=_READ_AHEAD, cache_type="readahead")
            else:
                file = _opened_to_write(system, path)
            with file:
                yield cast(BinaryIO, file)

    def opened(self) -> "RemoteFile":
        """The object, open for reading at any offset."""
        return RemoteFile(self)

    def put(self, data: bytes) -> None:
        """Write the object at once: readers find the old content or the new one."""
        with self._fresh() as (system, path):
            if isinstance(system, LocalFileSystem):  # a file, unlike an object, appears before it is complete
                hidden = f"{path}.new"
                with _opened_to_write(system, hidden) as file:
                    file.write(data)
                system.mv(hidden, path)
            else:
                system.pipe_file(path, data)

    def small_objects(self, most: int) -> dict["RemotePath", bytes]:
        """The objects directly below that have ``most`` bytes at most, with their contents, read at once."""
        with self._fresh() as (system, path):
            listed = system.ls(path, detail=True) if system.isdir(path) else []
            names = [entry["name"] for entry in listed if entry["type"] == "file" and (entry["size"] or 0) <= most]
            # Omitted: an object that another process has deleted since it was listed.
            contents = system.cat(names, on_error="omit") if names else {}
            return {self / PurePosixPath(name).name: bytes(data) for name, data in contents.items()}

    def unlink(self) -> None:
        """Delete the object, if it is there."""
        with self._fresh() as (system, path), suppress(FileNotFoundError):
            system.rm_file(path)

    def delete_all(self) -> None:
        """Delete all objects below."""
        with self._fresh() as (system, path):
            if isinstance(system, LocalFileSystem):
                shutil.rmtree(path, ignore_errors=True)
            elif system.exists(path):
                system.rm(path, recursive=True)

    @contextmanager
    def _fresh(self) -> Iterator[tuple[Any, str]]:
        """The file system, without listings that it has kept, and the path in it; errors name the address.

        Raises:
            CheckpointError: there is no such file system here.
        """
        protocol = get_protocol(self.url)
        try:
            system, path = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            package = known_implementations.get(protocol, {}).get("class", protocol).partition(".")[0]
            raise CheckpointError(
                f"{self.url} needs a package that is not installed: pip install {package} ({error})."
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{self.url} is no address that fsspec knows: {error}.") from error
        try:
            # `fsspec` has one object per storage in a process, and keeps what it has listed.
            system.invalidate_cache()
            yield system, path
        except CheckpointError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and self.url in str(error):  # it came through here once, in an inner call
                raise
            error_class = next((known for known in _TOLD_APART if isinstance(error, known)), OSError)
            is_missing = error_class is FileNotFoundError
            what = "not there, or not seen from here" if is_missing else type(error).__name__
            raise error_class(f"{self.url}: {what}: {error} (is the address right, are credentials set?)") from error


@final
class RemoteFile:
    """Object that is read in ranges; see :class:`~smp_strategy.checkpoint.storage.verified_reads.Files`."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._size = path, path.stat().st_size
        # Entered by hand, because the file stays open between reads; :meth:`close` leaves the context.
        self._context = path.open("rb")
        self._file = self._context.__enter__()

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self._size

    def read_at(self, memory: memoryview, offset: int) -> int:
        """Read to ``memory``; returns how many bytes were read, 0 at the end.

        Raises:
            OSError: they cannot be read.
        """
        try:
            self._file.seek(offset)
            data = self._file.read(len(memory))
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self._path}: {type(error).__name__}: {error}") from error
        memory[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._context.__exit__(None, None, None)


AnyPath = Path | RemotePath
"""A path of this machine, or of another storage."""


def any_path(given: Any) -> AnyPath:
    """The path of this machine, or of another storage, that ``given`` names."""
    if isinstance(given, Path | RemotePath):
        return given
    text = str(given)
    if "://" not in text or get_protocol(text) == "file":
        return Path(text.removeprefix("file://"))
    return RemotePath(text.rstrip("/"))


def local_path(given: Any, reason: str = _ONLY_LIGHTNING) -> Path:
    """The path that ``given`` names, which must not be an address.

    Args:
        given: Path or address.
        reason: Says in the error who does not take addresses, and the remedy.

    Raises:
        CheckpointError: it is an address.
    """
    place = any_path(given)
    if isinstance(place, RemotePath):
        raise CheckpointError(f"{place} is an address, {reason}")
    return place


def _opened_to_write(system: Any, path: str) -> io.IOBase:
    try:
        file = system.open(path, "wb")
    except FileNotFoundError:  # a file system, which needs the folder; storages of objects need none
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        file = system.open(path, "wb")
    return cast(io.IOBase, file)
