"""Full verification of a checkpoint of any form: its damage, or the reason why it is no checkpoint."""

from pathlib import Path

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage import dcp_metadata, manifest
from smp_strategy.checkpoint.storage import full_file_digests as full_digests
from smp_strategy.checkpoint.storage.detect_sharded import opened
from smp_strategy.checkpoint.storage.full_file_digests import problems_of_bytes
from smp_strategy.checkpoint.storage.path_kind import has_manifest
from smp_strategy.checkpoint.storage.torch_load import load_file
from smp_strategy.checkpoint.storage.verified_reads import Damage, problems_of_files
from smp_strategy.errors import CheckpointError

__all__ = ["Damage", "has_digests", "problems_of"]


def has_digests(path: Path) -> bool:
    """Whether damage of a file or folder would be noticed."""
    return has_manifest(path) if path.is_dir() else full_digests.has_digests(path)


def problems_of(path: Path | str) -> list[Damage]:
    """Read all of a checkpoint and compare it with its digests.

    Takes a full file, a sharded folder, or a folder of other files with a manifest
    (:mod:`~smp_strategy.checkpoint.storage.verified_reads`) with the folders in it. A checkpoint of another program has
    no digests: it is opened at least.

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
