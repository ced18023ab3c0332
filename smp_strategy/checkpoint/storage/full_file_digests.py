"""Digests inside a file of ``torch.save``: every byte is covered, and other readers ignore them.

Such a file is a zip archive. One more record is put behind the others, with a digest of each record of values and one
of all bytes in between. The archive's comment, at the very end, has a digest of that record and of the table of
contents::

    values of data.pkl, data/0, data/1, ...    a digest each            } in smp_strategy/checksums.json
    headers, padding, the small records        one digest for all       }
    smp_strategy/checksums.json, the table     one digest, in the comment, which also says where they begin

So the file is verified without parsing it, and other readers find one record more, which they do not ask for.

For error messages, :func:`names_by_record` maps records to the names of their tensors, by the file's pickle. That is
read with a stand-in for each class and function that it names, so that nothing of an untrusted file is imported or
called.
"""

import io
import json
import os
import pickle
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, final

import xxhash

from smp_strategy.checkpoint.storage.verified_reads import Damage
from smp_strategy.errors import CheckpointError

__all__ = ["ListeningFile", "append_digests", "has_digests", "names_by_record", "problems_of_bytes", "values_at"]

# Bound on the search for names in a hostile pickle.
_MOST_NAMES = 1_000_000


def names_by_record(data: bytes) -> dict[str, list[str]]:
    """Names of tensors by the number of their record: ``{"0": ["state_dict.layer.weight"]}``.

    Args:
        data: The file's ``data.pkl``. Parts that cannot be read give no names.
    """
    try:
        content = _Reader(io.BytesIO(data)).load()
    except Exception:  # hostile bytes can raise anything
        return {}
    found: dict[str, list[str]] = defaultdict(list)
    seen: set[tuple[int, str]] = set()
    waiting: list[tuple[Any, str]] = [(content, "")]
    while waiting and len(seen) < _MOST_NAMES:
        each, name = waiting.pop()
        if isinstance(each, _Record):
            if name not in found[each.number]:
                found[each.number].append(name)
            continue
        parts = _parts(each, name)
        if parts and (id(each), name[:200]) not in seen:
            seen.add((id(each), name[:200]))
            waiting += reversed(parts)
    return dict(found)


@final
class _Record:
    def __init__(self, number: str) -> None:
        self.number = number


class _Anything(dict[Any, Any]):
    """Stand-in for the result of any function or class."""

    made_of: tuple[Any, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Anything":
        made = super().__new__(cls)
        made.made_of = (*args, *kwargs.values())
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.made_of = (*self.made_of, state)

    def append(self, item: Any) -> None:
        """Stands in for ``list.append``."""
        self.made_of = (*self.made_of, item)

    def extend(self, items: Any) -> None:
        """Stands in for ``list.extend``."""
        self.made_of = (*self.made_of, *items)

    add = append


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _Anything

    def persistent_load(self, pid: Any, /) -> Any:
        return _Record(str(pid[2]))


def _parts(each: Any, name: str) -> list[tuple[Any, str]]:
    dot = "." if name else ""
    parts: list[tuple[Any, str]] = []
    if isinstance(each, dict):
        parts += [(value, f"{name}{dot}{key}") for key, value in dict.items(each)]
    if isinstance(each, _Anything):
        parts += [(value, name) for value in each.made_of]
    if type(each) in (list, tuple):
        # A tuple can be the arguments of a function, whose result has their names.
        parts += [(value, f"{name}{dot}{number}") for number, value in enumerate(each)]
    return parts


_RECORD: Final = "smp_strategy/checksums.json"
_VERSION: Final = 1
_COMMENT: Final = "smp_strategy:xxh3_128:{start:020d}:{digest:32}"
_COMMENT_PATTERN: Final = re.compile(rb"smp_strategy:xxh3_128:(\d{20}):([0-9a-f]{32})")
_COMMENT_LENGTH: Final = len(_COMMENT.format(start=0, digest=""))
_DIGEST_LENGTH: Final = 32
_LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")
_DATE: Final = (1980, 1, 1, 0, 0, 0)
_WINDOW: Final = 2**20  # bytes digested at a time, while they are in the processor's cache
_LARGE: Final = 2**14  # bytes; digests of smaller values are taken by reading them again
_NEAR_THE_END: Final = 2**10  # bytes


class _Stretch(NamedTuple):
    name: str
    offset: int
    length: int
    digest: str

    @property
    def end(self) -> int:
        return self.offset + self.length


@final
class ListeningFile:
    """Sink for ``torch.save`` that keeps the digests of large values, each of which comes in one piece.

    Args:
        file: Open for writing, buffered; for :meth:`put` at any place.

    Attributes:
        file: As given.
        position: Number of bytes so far.
        heard: Digests, by offset and length.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.position = 0
        self.heard: dict[tuple[int, int], str] = {}

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        if len(view) < _LARGE:
            self.file.write(view)
        else:
            self._write_large(self.position, view)
        self.position += len(view)
        return len(view)

    def leave_out(self, length: int) -> None:
        """Leave room for ``length`` bytes instead of writing them."""
        self.file.seek(length, os.SEEK_CUR)
        self.position += length

    def put(self, offset: int, data: memoryview) -> None:
        """Write bytes that were left out to their place."""
        self.file.seek(offset)
        self._write_large(offset, data)

    def _write_large(self, offset: int, view: memoryview) -> None:
        digest = xxhash.xxh3_128()
        for start in range(0, len(view), _WINDOW):
            part = view[start : start + _WINDOW]
            digest.update(part)
            self.file.write(part)
        self.heard[offset, len(view)] = digest.hexdigest()

    def flush(self) -> None:
        """Flush the buffer; ``torch.save`` calls it."""
        self.file.flush()


def append_digests(path: Path, heard: dict[tuple[int, int], str]) -> None:
    """Add digests to a file that ``torch.save`` has written.

    Args:
        path: Path of the file.
        heard: Digests that are known already, see :class:`ListeningFile`.
    """
    with zipfile.ZipFile(path, "a") as archive, open(path, "rb") as file:
        start = archive.start_dir  # offset of the next record
        root = archive.infolist()[0].filename.partition("/")[0]
        stretches = []
        for entry in archive.infolist():
            name = entry.filename.partition("/")[2]
            if (name == "data.pkl" or name.startswith("data/")) and entry.file_size:
                offset = values_at(file, entry.header_offset)
                digest = heard.get((offset, entry.file_size)) or _digest(file, offset, entry.file_size)
                stretches.append(_Stretch(name, offset, entry.file_size, digest))
        stretches.sort(key=lambda each: each.offset)
        content = {"version": _VERSION, "between": _between(file, stretches, start), "records": stretches}
        archive.writestr(zipfile.ZipInfo(f"{root}/{_RECORD}", _DATE), json.dumps(content))
        archive.comment = _COMMENT.format(start=start, digest="").encode()
    size = path.stat().st_size
    with open(path, "r+b") as changed:
        digest = _digest(changed, start, size - _DIGEST_LENGTH - start)
        changed.seek(size - _DIGEST_LENGTH)
        changed.write(digest.encode())


def problems_of_bytes(path: Path) -> list[Damage] | None:
    """Compare a file with its digests; ``None`` if it has none, since another program wrote it.

    Raises:
        FileNotFoundError: there is none.
    """
    with open(path, "rb") as file:
        try:
            found = _records(file)
            if found is None:
                return None
            start, between, stretches = found
            damaged = [each for each in stretches if _digest(file, each.offset, each.length) != each.digest]
            is_intact = _between(file, stretches, start) == between
        except CheckpointError as error:
            return [Damage(path.name, "", str(error))]
        names = _names(file, stretches, damaged)
    problems = [_problem(path, each, names) for each in damaged]
    if not is_intact:
        problems.append(Damage(path.name, "", "the file's structure has changed since it was written."))
    return problems


def has_digests(path: Path) -> bool:
    """Whether changes of a file would be noticed; reads only its end."""
    with open(path, "rb") as file:
        try:
            return _records(file) is not None
        except CheckpointError:  # a damaged file is noticed
            return True


def _problem(path: Path, each: _Stretch, names: dict[str, list[str]]) -> Damage:
    where = f"(bytes {each.offset} to {each.end} of the file)"
    if each.name == "data.pkl":
        return Damage(path.name, "", f"the file's structure has changed since it was written {where}.")
    known = names.get(each.name.removeprefix("data/"), [])
    name, others = (known[0], known[1:]) if known else (f"record {each.name}", [])
    also = f", and with it {', '.join(others[:3])}{', ...' if others[3:] else ''}" if others else ""
    return Damage(path.name, name, f"has changed since it was written {where}{also}.")


def _names(file: BinaryIO, stretches: list[_Stretch], damaged: list[_Stretch]) -> dict[str, list[str]]:
    pickled = next((each for each in stretches if each.name == "data.pkl"), None)
    if not damaged or pickled is None or pickled in damaged:
        return {}
    file.seek(pickled.offset)
    return names_by_record(file.read(pickled.length))


def _records(file: BinaryIO) -> tuple[int, str, list[_Stretch]] | None:
    """Begin and content of the record with the digests, verified; ``None`` if there is none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _NEAR_THE_END, 0))
    end = file.read()
    comment = _COMMENT_PATTERN.fullmatch(end[-_COMMENT_LENGTH:])
    if comment is None:
        # The other one of our two traces is there, so the comment has changed.
        if _RECORD.encode() in end or b"smp_strategy:xxh3_128:" in end:
            raise CheckpointError("the file's structure has changed since it was written, at its end.")
        return None
    start = int(comment[1])
    if start > size or _digest(file, start, size - _DIGEST_LENGTH - start) != comment[2].decode():
        raise CheckpointError("the file's structure has changed since it was written, in its last part.")
    try:
        file.seek(start)
        length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))[7]
        file.seek(values_at(file, start))
        content = json.loads(file.read(length))
        if content["version"] != _VERSION:
            raise CheckpointError(
                f"its digests are of version {content['version']!r}, and this is version {_VERSION}. Read it with a "
                "newer smp_strategy."
            )
        stretches = [_Stretch(*each) for each in content["records"]]
        end_before = 0
        for each in stretches:
            if not (isinstance(each.name, str) and end_before <= each.offset <= each.end <= start):
                raise ValueError(f"a record of it is {each}")
            end_before = each.end
        return start, str(content["between"]), stretches
    except (KeyError, TypeError, ValueError, AttributeError, struct.error, RecursionError) as error:
        raise CheckpointError(f"its digests are none: {type(error).__name__}: {error}") from error


def values_at(file: BinaryIO, header: int) -> int:
    """Offset of the values of the record whose header is at ``header``."""
    file.seek(header)
    *_, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return header + _LOCAL_HEADER.size + name + extra


def _between(file: BinaryIO, stretches: list[_Stretch], end: int) -> str:
    digest, position = xxhash.xxh3_128(), 0
    for each in [*stretches, _Stretch("", end, 0, "")]:
        for part in _read(file, position, each.offset - position):
            digest.update(part)
        position = each.end
    return digest.hexdigest()


def _digest(file: BinaryIO, offset: int, length: int) -> str:
    digest = xxhash.xxh3_128()
    for part in _read(file, offset, length):
        digest.update(part)
    return digest.hexdigest()


def _read(file: BinaryIO, offset: int, length: int) -> Iterator[memoryview]:
    """Read in parts, each valid until the next; fewer bytes if the file ends before."""
    file.seek(offset)
    window = memoryview(bytearray(min(max(length, 0), _WINDOW)))
    while length > 0 and (count := file.readinto(window[: min(length, len(window))])):  # type: ignore[attr-defined]
        yield window[:count]
        length -= count
