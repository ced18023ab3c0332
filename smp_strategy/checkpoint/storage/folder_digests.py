"""Digests for folders whose files are defined by other programs: a ``manifest.json`` beside them.

The manifest is that of a sharded folder (:mod:`smp_strategy.checkpoint.storage.manifest`), made afterwards for existing
files of any kind. For safetensors it has a region for each tensor, so that damage is reported with the tensor's name.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from smp_strategy.checkpoint.storage.checksums import PIECE, digest, pieces_of
from smp_strategy.checkpoint.storage.manifest import FILE_NAME, Manifest, Region
from smp_strategy.errors import CheckpointError

__all__ = ["describe", "verify"]

_LENGTH: Final = 8  # bytes of the header's length in a safetensors file


def describe(folder: Path, note: dict[str, Any]) -> None:
    """Write the manifest of all files in ``folder``, not of subfolders. Must be the last write to the folder."""
    paths = sorted(each for each in folder.iterdir() if each.is_file() and each.name != FILE_NAME)
    files = {path.name: tuple(_regions(path)) for path in paths}
    (folder / FILE_NAME).write_bytes(Manifest(note=note, files=files).to_bytes())


def verify(folder: Path, names: Iterable[str] | None = None) -> None:
    """Compare files with the manifest, if there is one. Missing files are not reported here.

    Args:
        folder: Folder with the files.
        names: Names of the files; ``None``: all.

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
