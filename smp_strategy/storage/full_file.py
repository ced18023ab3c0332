"""A checkpoint that is one ordinary file of ``torch.save``: written in one pass, read once it is verified.

Nothing is copied to memory on the way to the disk, where Lightning has all of it twice. The file has digests of its own
(:mod:`~smp_strategy.storage.full_digests`), which other readers do not notice; files of other programs have none, and
are read without.
"""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smp_strategy.errors import CheckpointError
from smp_strategy.storage import commit
from smp_strategy.storage.full_digests import ListeningFile, append_digests, problems_of_bytes
from smp_strategy.storage.safe_types import allowing_plain_values
from smp_strategy.storage.verify import Problem

__all__ = ["problems_of_file", "read_full", "verified", "write_full"]

_BUFFER = 2**20  # bytes


def write_full(path: Path | str, content: Mapping[str, Any]) -> None:
    """Let ``path`` be a file with ``content``; until all of it is on the disk, it is what it was.

    Args:
        path: of the file. Missing folders are made.
        content: what ``torch.save`` takes. Tensors may be on any device, they are copied one by one.
    """
    with commit.replacing(Path(path), is_folder=False) as staging:
        with open(staging, "wb", buffering=_BUFFER) as file:
            listening = ListeningFile(file)
            torch.save(content, listening)  # type: ignore[arg-type] # writing is all that it asks for
        append_digests(staging, listening.heard)


def read_full(path: Path | str, *, weights_only: bool = True, verify: bool = True) -> Any:
    """What a file has. Tensors are in host memory, read when they are used.

    They stay what they are when the file is replaced or deleted, by us or by a rename; but not if somebody writes into
    it, as ``cp`` over it does, while they are used.

    Args:
        path: of the file, by us or by another program.
        weights_only: see ``torch.load``. Without it the file can run code: only for files that one trusts.
        verify: compare all of it to its digests first. Of ranks that read the same file one may do that for all.

    Raises:
        CheckpointError: it is damaged, no checkpoint, or cannot be loaded without running code.
        FileNotFoundError: there is none.
    """
    path = Path(path)
    commit.recover(path)
    if verify:
        verified(path)
    try:
        with allowing_plain_values():
            return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if weights_only and isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{path} cannot be loaded without running code that it names, or is damaged: {reason} Load it with "
                "`weights_only=False` if you trust whoever wrote it; or allow its classes, if you know them, by "
                "`torch.serialization.add_safe_globals`."
            ) from error
        if not weights_only and not isinstance(error, RuntimeError | EOFError | pickle.UnpicklingError):
            raise  # of a class of the user
        raise CheckpointError(
            f"{path} is damaged, or no checkpoint: {type(error).__name__}: {reason} Load another one."
        ) from error


def verified(path: Path) -> None:
    """Compare a file to its digests, if it has some.

    Raises:
        CheckpointError: it has changed since it was written.
        FileNotFoundError: there is none.
    """
    if problems := problems_of_bytes(path):
        first = problems[0]
        more = f" ({len(problems) - 1} more.)" if len(problems) > 1 else ""
        what = f"tensor `{first.tensor}`: " if first.tensor else ""
        raise CheckpointError(f"{path} is damaged: {what}{first.what}{more} Load another one.")


def problems_of_file(path: Path | str) -> list[Problem]:
    """Read all of a file, and say what has changed in it since it was written, or that it is none."""
    path = Path(path)
    commit.recover(path)
    try:
        problems = problems_of_bytes(path)
        if not problems:
            read_full(path, verify=False)
    except (CheckpointError, OSError) as error:
        return [Problem(path.name, "", str(error))]
    return problems or []
