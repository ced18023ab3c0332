"""What to load in the place of a checkpoint that is damaged: the newest other one beside it that is not.

Only what can be verified is offered. All of it is read for that, so this is for one rank, or for the few files that are
read as a whole by everyone anyway.
"""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smp_strategy.errors import CheckpointError
from smp_strategy.storage import commit, manifest
from smp_strategy.storage.opening import is_sharded, opened
from smp_strategy.storage.verify import problems_of

__all__ = ["advice", "is_checkpoint", "previous"]

_FIRST_BYTES = b"PK\x03\x04"
_MOST_TRIED = 10


def is_checkpoint(path: Path) -> bool:
    """Whether it looks like one of either form."""
    try:
        if path.is_dir():
            return is_sharded(path) or (path / manifest.FILE_NAME).is_file()
        with open(path, "rb") as file:
            return file.read(len(_FIRST_BYTES)) == _FIRST_BYTES
    except OSError:
        return False


def previous(path: Path | str, *, quickly: bool = False) -> Path | None:
    """The newest checkpoint beside ``path`` that is undamaged, of either form; ``None`` if there is none.

    Args:
        path: the damaged one.
        quickly: believe what looks whole, without reading all of it.
    """
    path = Path(path)
    folder = path.parent
    if not folder.is_dir():
        return None
    commit.recover_all(folder)
    for number, each in enumerate(_newest_first(folder, path)):
        if number == _MOST_TRIED:
            break
        if _looks_whole(each) if quickly else not problems_of(each):
            return each
    return None


def advice(path: Path | str, *, quickly: bool = False) -> str:
    """A sentence about what to do without ``path``, which is damaged; for ``quickly`` see :func:`previous`."""
    found = previous(path, quickly=quickly)
    if found is None:
        return f"There is no undamaged checkpoint beside it in {Path(path).parent}: restore it from a copy."
    if quickly:
        return f"The newest other checkpoint beside it is {found}: `smp verify {found}` reads all of that one."
    return f"The newest undamaged checkpoint beside it is {found}: load that one (`ckpt_path={str(found)!r}`)."


def _looks_whole(path: Path) -> bool:
    try:
        if path.is_dir():
            if is_sharded(path):
                opened(path)
            return True
        return zipfile.is_zipfile(path)  # its directory is at the end
    except (CheckpointError, OSError):
        return False


def _newest_first(folder: Path, damaged: Path) -> Iterator[Path]:
    found = []
    for each in folder.iterdir():
        # A link leads to one that is in the list itself, or to the damaged one.
        if each.name.startswith(".") or each.is_symlink() or _is_same(each, damaged) or not is_checkpoint(each):
            continue
        newest = max((part.stat().st_mtime_ns for part in each.iterdir()), default=0) if each.is_dir() else 0
        found.append((newest or each.stat().st_mtime_ns, each))
    yield from (each for _, each in sorted(found, reverse=True))


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
