"""Full verification of a checkpoint of any form, and the newest undamaged one beside a damaged one.

Only verified checkpoints are offered. Verifying reads all of them, so this is for one rank, or for the few files that
every rank reads as a whole anyway.
"""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage import dcp_metadata, manifest
from smp_strategy.checkpoint.storage.detect_sharded import is_sharded, opened
from smp_strategy.checkpoint.storage.full_file_checksums import has_checksums, problems_of_bytes
from smp_strategy.checkpoint.storage.path_kind import CheckpointKind, has_manifest, kind_of
from smp_strategy.checkpoint.storage.torch_load import load_file
from smp_strategy.checkpoint.storage.verified_reads import Damage, problems_of_files
from smp_strategy.errors import CheckpointError

__all__ = ["has_digests", "problems_of", "advice", "previous"]


def has_digests(path: Path) -> bool:
    """Whether damage of a file or folder would be noticed."""
    return has_manifest(path) if path.is_dir() else has_checksums(path)


def problems_of(path: Path | str) -> list[Damage]:
    """Read all of a checkpoint and compare it with its digests.

    Takes a full file, a sharded folder, or a folder of other files with a manifest
    (:mod:`~smp_strategy.checkpoint.storage.verified_reads`) with the folders in it. A checkpoint without
    digests is opened at least.

    Raises:
        FileNotFoundError: there is nothing.
    """
    path = Path(path)
    commit.recover(path)
    if not path.is_dir():
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


def _opened(directory: Path) -> list[Damage]:
    try:
        opened(directory)
    except CheckpointError as error:
        return [Damage(directory.name, "", str(error))]
    return []


_KINDS: Final = (CheckpointKind.TORCH_FILE, CheckpointKind.SHARDED, CheckpointKind.STATE)
_MOST_TRIED: Final = 10


def previous(path: Path | str, *, quickly: bool = False) -> Path | None:
    """The newest undamaged checkpoint beside ``path``, of any form that has digests; ``None`` if there is none.

    Args:
        path: The damaged checkpoint.
        quickly: Accept a checkpoint that looks complete, without reading all of it.
    """
    for number, each in enumerate(each for each in _others(Path(path)) if has_digests(each)):
        if number == _MOST_TRIED:
            break
        if _looks_whole(each) if quickly else not problems_of(each):
            return each
    return None


def advice(path: Path | str, *, quickly: bool = False) -> str:
    """A sentence that tells the user what to load instead of the damaged ``path``; for ``quickly`` see
    :func:`previous`."""
    found = previous(path, quickly=quickly)
    if found is not None and quickly:
        return f"The newest other checkpoint beside it is {found}: `smp verify {found}` reads all of that one."
    if found is not None:
        return f"The newest undamaged checkpoint beside it is {found}: load that one (`ckpt_path={str(found)!r}`)."
    unknown = next((each for each in _others(Path(path)) if not has_digests(each) and _looks_whole(each)), None)
    if unknown is not None:
        return (
            f"No checkpoint beside it is known to be undamaged: the newest one, {unknown}, has no digests, so damage "
            "cannot be ruled out."
        )
    return f"There is no undamaged checkpoint beside it in {Path(path).parent}: restore it from a copy."


def _looks_whole(path: Path) -> bool:
    try:
        if path.is_dir():
            if is_sharded(path):
                opened(path)
            return True
        return zipfile.is_zipfile(path)  # the table of an archive is at its end, so a truncated file has none
    except (CheckpointError, OSError):
        return False


def _others(damaged: Path) -> Iterator[Path]:
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


def _is_checkpoint(path: Path) -> bool:
    try:
        return kind_of(path) in _KINDS
    except OSError:
        return False


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
