"""Is a checkpoint complete and undamaged, and if not, which is the newest undamaged one beside it?

A sharded folder is opened (:func:`opened`) and looks complete as far as sizes and descriptions tell. The verification
of a checkpoint of any form (:func:`problems_of`) compares all of it with its digests.

Only verified checkpoints are offered. Verifying reads all of them, so this is for one rank, or for the few files that
every rank reads as a whole anyway.
"""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage import dcp_metadata, manifest
from smp_strategy.checkpoint.storage.dcp_metadata import DirectoryContents, ItemLocation
from smp_strategy.checkpoint.storage.full_file_checksums import has_checksums, problems_of_bytes
from smp_strategy.checkpoint.storage.manifest import Manifest, Region
from smp_strategy.checkpoint.storage.path_kind import CheckpointKind, has_manifest, kind_of
from smp_strategy.checkpoint.storage.remote_path import AnyPath, RemotePath, any_path
from smp_strategy.checkpoint.storage.torch_load import load_file
from smp_strategy.checkpoint.storage.verified_reads import Damage, DamageError, Files, problems_of_files
from smp_strategy.errors import CheckpointError

__all__ = [
    "Opened",
    "advice",
    "has_digests",
    "is_sharded",
    "opened",
    "previous",
    "problems_of",
    "verify_whole",
]

Regions = dict[tuple[str, int], Region]


class Opened(NamedTuple):
    """Sharded folder that looks complete."""

    contents: DirectoryContents
    manifest: Manifest | None
    """``None`` if another program has written the folder."""
    regions: Regions
    """Regions of the manifest by file and offset."""


def is_sharded(path: AnyPath | str) -> bool:
    """Whether ``path`` is a folder of PyTorch's distributed checkpoints, ours or another's."""
    path = commit.readable(any_path(path))
    return path.is_dir() and (path / dcp_metadata.FILE_NAME).is_file()


def opened(path: AnyPath) -> Opened:
    """Read the descriptions of a sharded folder, and compare them with the sizes of the files.

    Raises:
        DamageError: they do not agree, or a description is damaged or hostile.
        CheckpointError: it is no such directory.
    """
    path = commit.readable(path)
    if not is_sharded(path):
        raise CheckpointError(
            f"{path} is no directory that ranks have written together: there is no {dcp_metadata.FILE_NAME} in it."
        )
    try:
        data = (path / dcp_metadata.FILE_NAME).read_bytes()
        found = None
        if (path / manifest.FILE_NAME).is_file():
            found = Manifest.from_bytes((path / manifest.FILE_NAME).read_bytes())
            verify_whole(found, dcp_metadata.FILE_NAME, data)
        contents = dcp_metadata.from_bytes(data)
        if contents.has_manifest and found is None:
            raise DamageError(f"{manifest.FILE_NAME}, which was written with it, is missing.")
        files = found.files.items() if found else ()
        regions = {(file, region.offset): region for file, each in files for region in each}
        _check_locations(path, contents, found, regions)
    except OSError as error:
        raise DamageError(f"{path} cannot be read: {error}") from error
    except CheckpointError as error:
        raise DamageError(f"{path} is damaged, or no checkpoint: {error}") from error
    return Opened(contents, found, regions)


def verify_whole(found: Manifest, file: str, data: bytes) -> None:
    """Compare the content of a file that is one region with its digests.

    Raises:
        DamageError: the content has changed.
    """
    regions = found.files.get(file, ())

    def read(start: int, stop: int) -> bytes:
        return data[start:stop]

    is_whole = len(data) == sum(region.length for region in regions)
    if not is_whole or any(any(region.changed(read, found.piece)) for region in regions):
        raise DamageError(f"{file} has changed since it was written.")


def _check_locations(path: AnyPath, contents: DirectoryContents, found: Manifest | None, regions: Regions) -> None:
    """Check that files have the expected sizes, and that ``.metadata`` and the manifest agree."""
    with Files(path) as files:
        for file, parts in found.files.items() if found else ():
            size, expected = files.size(file), sum(region.length for region in parts)
            if size != expected:
                raise DamageError(f"{file} has {size} bytes, but was written with {expected}.")
        locations = [(name, location, 0) for name, location in contents.objects.items()]
        for name, (described, chunks) in contents.tensors.items():
            locations += [(name, chunk.location, chunk.part.numel * described.dtype.itemsize) for chunk in chunks]
        for name, location, num_bytes in locations:
            if location.offset + location.length > (size := files.size(location.file)):
                raise DamageError(f"{location.file} ends after {size} bytes, before the end of `{name}`.")
            if found is not None:
                _check_agreement(name, location, num_bytes, regions)


def _check_agreement(name: str, location: ItemLocation, num_bytes: int, regions: Regions) -> None:
    region = regions.get((location.file, location.offset))
    if region is None or region.length != location.length or (num_bytes and region.values != num_bytes):
        raise DamageError(f"{manifest.FILE_NAME} tells of `{name}` other than {dcp_metadata.FILE_NAME}.")


def has_digests(path: AnyPath) -> bool:
    """Whether damage of a file or folder would be noticed."""
    if isinstance(path, RemotePath):
        path = commit.readable(path)
        return path.is_dir() and has_manifest(path)
    return has_manifest(path) if path.is_dir() else has_checksums(path)


def problems_of(path: AnyPath | str) -> list[Damage]:
    """Read all of a checkpoint and compare it with its digests.

    Takes a full file, a sharded folder, or a folder of other files with a manifest
    (:mod:`~smp_strategy.checkpoint.storage.verified_reads`) with the folders in it. A checkpoint without
    digests is opened at least.

    Raises:
        FileNotFoundError: there is nothing.
    """
    path = commit.readable(any_path(path))
    if isinstance(path, Path) and not path.is_dir():
        return problems_of_bytes(path) or _loaded(path)
    problems = problems_of_files(path)
    if problems is None:
        return [*_opened(path), Damage(manifest.FILE_NAME, "", "is missing, so nothing can be verified.")]
    if (path / dcp_metadata.FILE_NAME).exists():
        return problems or _opened(path)
    for inner in sorted(each for each in path.iterdir() if (each / manifest.FILE_NAME).is_file()):
        problems += [each._replace(file=f"{inner.name}/{each.file}") for each in problems_of(inner)]
    return problems


def _loaded(path: Path) -> list[Damage]:
    try:
        load_file(path, weights_only=True)
    except (CheckpointError, OSError) as error:
        return [Damage(path.name, "", str(error))]
    return []


def _opened(directory: AnyPath) -> list[Damage]:
    try:
        opened(directory)
    except CheckpointError as error:
        return [Damage(directory.name, "", str(error))]
    return []


_KINDS: Final = (CheckpointKind.TORCH_FILE, CheckpointKind.SHARDED, CheckpointKind.STATE)
_MOST_TRIED: Final = 10


def previous(path: AnyPath | str, *, quickly: bool = False) -> AnyPath | None:
    """The newest undamaged checkpoint beside ``path``, of any form that has digests; ``None`` if there is none.

    Args:
        path: The damaged checkpoint.
        quickly: Accept a checkpoint that looks complete, without reading all of it.
    """
    for number, each in enumerate(each for each in _others(any_path(path)) if has_digests(each)):
        if number == _MOST_TRIED:
            break
        if _looks_whole(each) if quickly else not problems_of(each):
            return each
    return None


def advice(path: AnyPath | str, *, quickly: bool = False) -> str:
    """A sentence that tells the user what to load instead of the damaged ``path``; for ``quickly`` see
    :func:`previous`."""
    found = previous(path, quickly=quickly)
    if found is not None and quickly:
        return f"The newest other checkpoint beside it is {found}: `smp verify {found}` reads all of that one."
    if found is not None:
        return f"The newest undamaged checkpoint beside it is {found}: load that one (`ckpt_path={str(found)!r}`)."
    unknown = next((each for each in _others(any_path(path)) if not has_digests(each) and _looks_whole(each)), None)
    if unknown is not None:
        return (
            f"No checkpoint beside it is known to be undamaged: the newest one, {unknown}, has no digests, so damage "
            "cannot be ruled out."
        )
    return f"There is no undamaged checkpoint beside it in {any_path(path).parent}: restore it from a copy."


def _looks_whole(path: AnyPath) -> bool:
    try:
        if isinstance(path, RemotePath):
            return bool(opened(path))
        if path.is_dir():
            if is_sharded(path):
                opened(path)
            return True
        return zipfile.is_zipfile(path)  # the table of an archive is at its end, so a truncated file has none
    except (CheckpointError, OSError):
        return False


def _others(damaged: AnyPath) -> Iterator[AnyPath]:
    """The other checkpoints in the same folder, newest first."""
    if not damaged.parent.is_dir():
        return
    commit.recover_all(damaged.parent)
    found = []
    for each in damaged.parent.iterdir():
        # The target of a link is listed itself, or is the damaged one.
        if each.name.startswith(".") or each.is_symlink() or _is_same(each, damaged) or not _is_checkpoint(each):
            continue
        newest = max((part.stat().st_mtime_ns for part in each.iterdir()), default=0) if each.is_dir() else 0
        found.append((newest or each.stat().st_mtime_ns, each))
    yield from (each for _, each in sorted(found, reverse=True))


def _is_checkpoint(path: AnyPath) -> bool:
    try:
        return kind_of(path) in _KINDS
    except OSError:
        return False


def _is_same(one: AnyPath, other: AnyPath) -> bool:
    if isinstance(one, RemotePath) or isinstance(other, RemotePath):
        return one == other
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
