"""Folders of checkpoints: which one is written or read, and how none looks complete before it is.

Everything is written beside its place and moved there at the end: whoever looks for the newest checkpoint finds a
complete one. A folder that exists already keeps its other files, so its new ones are moved in one by one.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Final

from smp_strategy.errors import ConfigError

__all__ = ["STATES", "WEIGHTS", "begin", "delete_oldest", "move_in", "newest", "numbered", "remove"]

# Files of earlier calls that would be read together with, or in the place of, those that are written now.
WEIGHTS: Final = r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
STATES: Final = r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"

_BESIDE: Final = ".incomplete"
_NUMBERED: Final = re.compile(r"checkpoint_(\d+)")


def numbered(folder: Path) -> list[Path]:
    """The checkpoints in ``folder`` that Accelerate has numbered, the oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), each) for each in folder.iterdir() if (match := _NUMBERED.fullmatch(each.name))]
    return [each for _, each in sorted(found)]


def newest(folder: Path) -> Path:
    """The checkpoint in ``folder`` with the highest number.

    Raises:
        ValueError: there is none.
    """
    found = numbered(folder)
    if not found:
        raise ValueError(
            f"There is no checkpoint to load in {folder}: `automatic_checkpoint_naming` looks for folders like "
            "`checkpoint_0` there. Call `accelerator.save_state()` before, or name a folder."
        )
    return found[-1]


def delete_oldest(folder: Path, limit: int) -> list[Path]:
    """Delete numbered checkpoints in ``folder`` until there are ``limit``; returns those that were deleted."""
    found = numbered(folder)
    surplus = found[: max(len(found) - limit, 0)]
    for each in surplus:
        shutil.rmtree(each)
    return surplus


def begin(target: Path) -> Path:
    """Make an empty folder for what will be in ``target``; its last name is the same, since hooks may look at that.

    Raises:
        ConfigError: ``target`` is a file.
    """
    if target.is_file():
        raise ConfigError(f"{target} is a file, but a folder is to be written. Name another one.")
    if target.exists():  # may be a mount point, or the only place where one may write
        place = target
    elif _NUMBERED.fullmatch(target.name) and target.parent.name == "checkpoints":
        place = target.parent.parent  # Accelerate takes whatever it finds in there for a checkpoint
    else:
        place = target.parent
    staging = place / _BESIDE / target.name
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def move_in(staging: Path, target: Path, *, replaces: str = "") -> None:
    """Let ``target`` have what is in ``staging``, which is gone afterwards.

    Args:
        staging: from :func:`begin`.
        target: may exist; files of the same names are replaced.
        replaces: pattern of the names of further files in ``target`` that are out of date then.
    """
    new = {each.name for each in staging.iterdir()}
    if target.exists():
        _merge(staging, target)
        for each in target.iterdir():
            if each.is_file() and each.name not in new and re.fullmatch(replaces, each.name):
                each.unlink()
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(staging, target)
    remove(staging)


def remove(staging: Path) -> None:
    """Whatever is left of ``staging``."""
    shutil.rmtree(staging, ignore_errors=True)
    if staging.parent.name == _BESIDE and staging.parent.is_dir() and not any(staging.parent.iterdir()):
        staging.parent.rmdir()


def _merge(source: Path, target: Path) -> None:
    for each in sorted(source.iterdir()):
        there = target / each.name
        if each.is_dir() and there.is_dir() and not there.is_symlink():
            _merge(each, there)
        else:
            os.replace(each, there)
