"""Checkpoint folders: naming, and atomic replacement so that no folder looks complete before it is.

Everything is written beside its place, synced to disk, and moved to its place at the end
(:mod:`smp_strategy.checkpoint.storage.atomic_commit`), so the newest checkpoint is always a complete one. A folder that
has an earlier checkpoint and nothing else is replaced as a whole, too. A folder with other files keeps them, so new
files are moved in one by one; a reader that comes in between detects that by the digests.
"""

import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage import verified_reads
from smp_strategy.checkpoint.storage.atomic_commit import saving
from smp_strategy.checkpoint.storage.manifest import FILE_NAME, FORMAT, Manifest
from smp_strategy.checkpoint.storage.path_kind import SHARDED_STATE, check_folder, foreign_entries
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.remote_path import local_path
from smp_strategy.checkpoint.storage.torch_load import allowing_plain_values, load_failure
from smp_strategy.checkpoint.storage.verify import previous
from smp_strategy.distributed.rendezvous import alike
from smp_strategy.errors import CheckpointError, ConfigError

__all__ = [
    "SHARDED",
    "STATES",
    "WEIGHTS",
    "begin",
    "delete_oldest",
    "describe",
    "filling",
    "move_in",
    "newest",
    "number_of",
    "numbered",
    "reading",
    "remove",
    "save_file",
    "stored",
    "to_read",
    "to_write",
    "verify",
    "writing",
    "weights_of",
]

# Subfolder of the sharded form, which all ranks write together.
SHARDED: Final = SHARDED_STATE
# Names of files of earlier saves that a reader would mix up with, or prefer to, the new ones.
WEIGHTS: Final = r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
STATES: Final = (
    r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)|optimizer(_\d+)?\.bin|random_states_\d+\.pkl|"
    rf"custom_checkpoint_\d+\.pkl|{SHARDED}|{re.escape(FILE_NAME)}"
)

_INDEX: Final = re.compile(r".*\.index(\..*)?\.json")
_NUMBERED: Final = re.compile(r"checkpoint_(\d+)")


def weights_of(variant: str | None) -> str:
    """The pattern for files of weights that transformers has written as ``variant``; ``None``: as usual."""
    if variant is None:
        return WEIGHTS
    name = re.escape(variant)
    return rf"model\.{name}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index\.{name}\.json"


def numbered(folder: Path) -> list[Path]:
    """List the checkpoints in ``folder`` that Accelerate has numbered, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((each for each in folder.iterdir() if _NUMBERED.fullmatch(each.name)), key=number_of)


def number_of(folder: Path) -> int:
    """The number in the name that Accelerate has given to a checkpoint."""
    match = _NUMBERED.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def newest(folder: Path) -> Path:
    """Return the checkpoint in ``folder`` with the highest number.

    Raises:
        ValueError: there is none.
    """
    commit.recover_all(folder)
    found = numbered(folder)
    if not found:
        raise ValueError(
            f"There is no checkpoint to load in {folder}: `automatic_checkpoint_naming` looks for folders like "
            "`checkpoint_0` there. Call `accelerator.save_state()` before, or name a folder."
        )
    return found[-1]


def delete_oldest(folder: Path, limit: int) -> list[Path]:
    """Delete numbered checkpoints in ``folder`` until ``limit`` are left; return the deleted ones."""
    found = numbered(folder)
    surplus = found[: max(len(found) - limit, 0)]
    for each in surplus:
        commit.remove(each)
    if surplus:
        commit.clean(folder)
    return surplus


def begin(target: Path) -> Path:
    """Make an empty staging folder for ``target``, with the same last path component, since hooks may look at it.

    It is this process's own: another one may save to ``target`` at the same time. What killed processes have left
    there is deleted.

    Raises:
        ConfigError: ``target``, or what is to hold it, is a file, a device, a FIFO or a socket.
    """
    check_folder(target)
    commit.recover(target)
    _check_manifest(target)
    if target.exists() and not _can_be_replaced(target):
        place = target
    elif _NUMBERED.fullmatch(target.name) and target.parent.name == "checkpoints":
        place = target.parent.parent  # Accelerate takes whatever it finds in there for a checkpoint
    else:
        place = target.parent
    with saving(target):
        place.mkdir(parents=True, exist_ok=True)
        for folder in {place, target.parent} if target.parent.is_dir() else {place}:
            commit.clean(folder)
        staging = commit.hidden_beside(place / target.name) / target.name
        staging.mkdir(parents=True)
    return staging


def to_write(given: Any) -> Path:
    """The folder that ``given`` names; an address is an error."""
    return local_path(given)


def to_read(given: Any) -> Path:
    """The folder with a state that ``given`` names; an interrupted save is put right first.

    Raises:
        ValueError: there is none.
    """
    folder = local_path(given).expanduser()
    commit.recover(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Name the folder that `accelerator.save_state` has written.")
    if not folder.is_dir():
        raise ValueError(f"Tried to find {folder} but folder does not exist")
    return folder


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Context of a part of a save to ``target`` that fails on all ranks, with its reason, if it fails on one.

    Collective at its end.
    """
    with alike(f"saving to {target}"), saving(target):
        yield


@contextmanager
def filling(staging: Path, target: Path, *, is_mine: bool) -> Iterator[None]:
    """Context in which ranks fill ``staging``, from :func:`begin`; after an error it is deleted if it ``is_mine``."""
    try:
        with saving(target):
            yield
    except BaseException:
        if is_mine:
            remove(staging)
        raise


def describe(staging: Path, note: dict[str, Any]) -> None:
    """Write the manifest of ``staging``: ``note`` and digests of all files."""
    verified_reads.describe(staging, note)


def verify(folder: Path) -> None:
    """Compare all files of ``folder`` with their digests, if it has some.

    Raises:
        CheckpointError: one is damaged; the newest undamaged folder beside it is named.
    """
    try:
        verified_reads.verify(folder)
    except CheckpointError as error:
        other = previous(folder)
        found = "There is no undamaged one" if other is None else f"The newest undamaged one is {other}"
        raise CheckpointError(f"{error} {found} beside it.") from None


def stored(folder: Path) -> CheckpointReader:
    """The state that all ranks have written to :data:`SHARDED` in ``folder``."""
    found = CheckpointReader.open(folder / SHARDED)
    found.rest()  # empty, but reading it reports damage
    return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context that reads ``path`` by a library, with plain values and no code.

    Raises:
        CheckpointError: a file is damaged, or names code that would have to be run.
    """
    try:
        with allowing_plain_values():
            yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} {load_failure(error)} Load another "
            'checkpoint, or pass `load_kwargs={"weights_only": False}` if you trust whoever wrote it.'
        ) from error
    except (EOFError, SafetensorError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error} Load another checkpoint.") from error


def save_file(state: Any, path: Path, **options: Any) -> None:
    """Write ``state`` by ``torch.save`` with its ``options``; the file appears when it is complete."""
    with commit.replacing(path, is_folder=False) as staging:
        torch.save(state, staging, **options)


def _check_manifest(target: Path) -> None:
    """Raise if the manifest file in ``target`` is not ours, because it would be replaced."""
    path = target / FILE_NAME
    if path.is_file() and FORMAT.encode() not in path.read_bytes():
        raise ConfigError(
            f"{path} was written by another program, and a state needs a file of this name for its digests. Save to "
            "another folder, or move the file away."
        )


def move_in(staging: Path, target: Path, *, replaces: str = "") -> None:
    """Move the content of ``staging`` into ``target``, and remove ``staging``.

    Args:
        staging: from :func:`begin`.
        target: may exist; files of the same names are replaced.
        replaces: pattern of the names of further files and folders in ``target`` that become out of date.
    """
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        commit.commit(staging, target)
    elif not staging.is_relative_to(target) and _has_nothing_else(target):
        commit.commit(staging, target)
    else:
        new = {each.name for each in staging.iterdir()}
        stale = {
            each.name
            for each in target.iterdir()
            if re.fullmatch(replaces, each.name)
            # An old index beside half of the new files would make them look complete.
            and (each.name not in new or _INDEX.fullmatch(each.name))
            and (each.name != SHARDED or not foreign_entries(each))
        }
        commit.merge(staging, target, stale=stale)  # an index comes after the files that it names
    remove(staging)


def _can_be_replaced(target: Path) -> bool:
    """Whether another folder may replace it: no mount, no link, not the working directory, writable parent."""
    is_busy = target.is_symlink() or os.path.ismount(target) or Path.cwd().is_relative_to(target.resolve())
    return not is_busy and os.access(target.parent, os.W_OK | os.X_OK)


def _has_nothing_else(target: Path) -> bool:
    """Whether the folder has only files that its checkpoint manifest lists."""
    try:
        Manifest.from_bytes((target / FILE_NAME).read_bytes())
    except (OSError, CheckpointError):
        return False
    return not foreign_entries(target)


def remove(staging: Path) -> None:
    """Delete the remains of ``staging``."""
    commit.discard(staging.parent)
