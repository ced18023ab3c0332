"""Checksums inside a file of ``torch.save``, by any program: damage is found, and the tensor is named.

Such a file is a zip archive, in which ``torch.save`` puts each tensor into a record with its CRC-32. ``torch.load``
maps values into memory and does not compare them, so all of a file is compared before it is read. Bytes that no reader
looks at, the padding between records for example, are not covered.

For error messages, :func:`names_by_record` maps records to the names of their tensors, by the file's pickle. That is
read with a stand-in for each class and function that it names, so that nothing of an untrusted file is imported or
called.
"""

import io
import pickle
import struct
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any, BinaryIO, Final, final

from smp_strategy.checkpoint.storage.verified_reads import Damage

__all__ = ["has_checksums", "names_by_record", "problems_of_bytes", "values_at"]

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


_LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")
_MAGIC: Final = b"PK\x03\x04"
_WINDOW: Final = 2**20  # bytes read at a time, while they are in the processor's cache


def problems_of_bytes(path: Path) -> list[Damage] | None:
    """Compare the records of a file with their checksums; ``None`` if it has none: it is no archive, or was written
    after ``torch.serialization.set_crc32_options(False)``.

    Raises:
        FileNotFoundError: there is none.
    """
    with open(path, "rb") as file:
        if not _is_archive(file):
            return None
        try:
            with zipfile.ZipFile(file) as archive:
                if not _has_checksums(archive):
                    return None
                damaged = [each for each in archive.infolist() if not _is_intact(archive, each)]
                names = _names(archive, damaged)
                return [_problem(path, each, names, values_at(file, each.header_offset)) for each in damaged]
        except Exception as error:  # hostile bytes can raise anything
            return [Damage(path.name, "", f"{_STRUCTURE}: {error}".rstrip(": .") + ".")]


def has_checksums(path: Path) -> bool:
    """Whether damage of a file would be noticed; reads only its table of contents."""
    with open(path, "rb") as file:
        if not _is_archive(file):
            return False
        try:
            with zipfile.ZipFile(file) as archive:
                return _has_checksums(archive)
        except Exception:  # a damaged file is noticed
            return True


_STRUCTURE: Final = "the file's structure has changed since it was written"


def _is_archive(file: BinaryIO) -> bool:
    return file.read(len(_MAGIC)) == _MAGIC


def _has_checksums(archive: zipfile.ZipFile) -> bool:
    return any(each.CRC for each in archive.infolist())


def _is_intact(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(record) as values:
            while values.read(_WINDOW):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def _names(archive: zipfile.ZipFile, damaged: list[zipfile.ZipInfo]) -> dict[str, list[str]]:
    pickled = next((each for each in archive.infolist() if _name(each) == "data.pkl"), None)
    if not damaged or pickled is None or pickled in damaged:
        return {}
    return names_by_record(archive.read(pickled))


def _name(record: zipfile.ZipInfo) -> str:
    return record.filename.partition("/")[2]


def _problem(path: Path, record: zipfile.ZipInfo, names: dict[str, list[str]], offset: int) -> Damage:
    where = f"(bytes {offset} to {offset + record.file_size} of the file)"
    if not _name(record).startswith("data/"):
        return Damage(path.name, "", f"{_STRUCTURE} {where}.")
    known = names.get(_name(record).removeprefix("data/"), [])
    name, others = (known[0], known[1:]) if known else (f"record {_name(record)}", [])
    also = f", and with it {', '.join(others[:3])}{', ...' if others[3:] else ''}" if others else ""
    return Damage(path.name, name, f"has changed since it was written {where}{also}.")


def values_at(file: BinaryIO, header: int) -> int:
    """Offset of the values of the record whose header is at ``header``."""
    file.seek(header)
    *_, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return header + _LOCAL_HEADER.size + name + extra
