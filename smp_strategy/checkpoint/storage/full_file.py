"""Full checkpoint: one ordinary file of ``torch.save``, written in one pass, verified before it is read.

Tensors are not copied to memory on the way to the disk, where Lightning holds all of them twice. The checksums are
those of ``torch.save`` (:mod:`~smp_strategy.checkpoint.storage.full_file_checksums`), so files of other programs are
verified, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage.atomic_commit import Check
from smp_strategy.checkpoint.storage.full_file_checksums import problems_of_bytes
from smp_strategy.checkpoint.storage.path_kind import check_replaceable
from smp_strategy.checkpoint.storage.torch_load import load_file
from smp_strategy.checkpoint.storage.verify import advice
from smp_strategy.errors import DamagedError

__all__ = ["read_full", "replacing_full", "verify_full", "write_full"]

_BUFFER = 2**20  # bytes


def write_full(path: Path | str, content: Mapping[str, Any], *, check: Check = check_replaceable) -> None:
    """Write ``content`` to ``path``, atomically.

    Args:
        path: Path of the file. Missing folders are made.
        content: Any dict that ``torch.save`` takes. Tensors may be on any device, they are copied one by one.
        check: See :func:`~smp_strategy.checkpoint.storage.atomic_commit.begin`.

    Raises:
        CheckpointError: it could not be written. The previous file is still there.
    """
    with replacing_full(Path(path), check=check) as file:
        torch.save(content, file)


@contextmanager
def replacing_full(path: Path, *, check: Check = check_replaceable) -> Iterator[BinaryIO]:
    """Context that gives a file for ``torch.save``, and puts it in the place of ``path``.

    Args:
        path: See :func:`write_full`.
        check: See :func:`write_full`.

    Raises:
        CheckpointError: See :func:`write_full`.
    """
    with (
        commit.replacing(path, is_folder=False, check=check) as staging,
        open(staging, "w+b", buffering=_BUFFER) as file,
    ):
        yield file


def read_full(path: Path | str, *, weights_only: bool = True, verify: bool = True) -> Any:
    """Read a full checkpoint. Tensors are mapped into host memory, and read when they are used.

    They are unaffected when the file is replaced or deleted, by us or by a rename; but not when somebody writes into
    it, as ``cp`` over it does, while they are used.

    Args:
        path: Path of the file, by us or by another program.
        weights_only: See ``torch.load``. Without it the file can run code: only for files that one trusts.
        verify: Compare all of it to its checksums first. If several ranks read the file, one may do that for all.

    Raises:
        CheckpointError: it is damaged, no checkpoint, or cannot be loaded without running code. If it is damaged, an
            undamaged one beside it is named.
        FileNotFoundError: there is none.
    """
    path = Path(path)
    commit.recover(path)
    if verify:
        verify_full(path)
    try:
        return load_file(path, weights_only=weights_only)
    except DamagedError as error:
        raise DamagedError(f"{error} {advice(path)}") from error


def verify_full(path: Path | str) -> None:
    """Compare all of a file to its checksums, if it has some.

    Raises:
        CheckpointError: it has changed since it was written, or is no checkpoint; an undamaged one beside it is named.
        FileNotFoundError: there is none.
    """
    path = Path(path)
    commit.recover(path)
    if problems := problems_of_bytes(path):
        first, more = problems[0], f" ({len(problems) - 1} more.)" if len(problems) > 1 else ""
        what = f"tensor `{first.tensor}` " if first.tensor else ""
        raise DamagedError(f"{path} is damaged: {what}{first.what}{more} {advice(path)}")
