"""How a file or folder is there as a whole or not at all, whenever its writer is killed.

It is written beside its place, under a hidden name [1], brought to the disk, renamed [2], and the rename is brought to
the disk. A file takes the place of another in one step, which a folder cannot: the old one is moved aside first [3],
and goes when the new one is in place [4]::

        in its place    hidden beside it
    [1] x.ckpt (old)    .x.ckpt.saving-...
    [3]                 .x.ckpt.saving-...   .x.ckpt.replaced (old)
    [2] x.ckpt (new)                         .x.ckpt.replaced (old)
    [4] x.ckpt (new)                         .x.ckpt.deleted-...

Who is killed after [3] leaves the old one to :func:`recover`, which must be called before ``x.ckpt`` is read. Who is
killed elsewhere leaves something hidden, which the next :func:`begin` in that folder deletes. It spares what a process
is still at: the hidden names tell the machine, the process and when that was started. What has been left by another
machine, of whose processes nothing can be known, is spared as long as it may have been written to lately.

One process begins and commits; others may write to what it has begun, on other machines as well.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from smp_strategy.checkpoint.storage.path_kind import check_replaceable
from smp_strategy.checkpoint.storage.write_errors import saving
from smp_strategy.errors import CheckpointError

__all__ = [
    "begin",
    "clean",
    "commit",
    "discard",
    "link",
    "merge",
    "recover",
    "recover_all",
    "remove",
    "replacing",
    "sync",
]

# What another machine has begun and not written to for so many seconds has been given up.
GIVEN_UP_SECONDS: Final = 3600.0

_HIDDEN: Final = re.compile(r"\..+\.(?:saving|deleted)-([0-9a-f]{8})-(\d+)-(\d+)-\d+")
_REPLACED: Final = re.compile(r"\.(.+)\.replaced")
_LONGEST_NAME: Final = 180  # bytes, of 255: the rest is for what is put around it
_NO_SYNC: Final = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
_ATTEMPTS: Final = 5

Check = Callable[[Path], None]


def begin(target: Path, *, is_folder: bool, check: Check = check_replaceable) -> Path:
    """Make an empty file or folder beside ``target``, to be filled and given to :func:`commit` or :func:`discard`.

    Missing folders above are made. What dead processes have left in the folder is deleted.

    Args:
        target: what is to be written.
        is_folder: whether it is a folder.
        check: raises an error if what is there must not be replaced.
    """
    recover(target)
    check(target)
    _make_folder(target.parent)
    staging = _mine(target, "saving")
    if is_folder:
        staging.mkdir()
    else:
        staging.touch(exist_ok=False)
    clean(target.parent, now=staging.stat().st_mtime)
    return staging


def commit(staging: Path, target: Path, *, check: Check = check_replaceable) -> None:
    """Let ``target`` be what ``staging`` is, which is gone then; all of it is on the disk when this returns.

    Args:
        staging: from :func:`begin`, complete and closed.
        target: as for :func:`begin`. A file or link of that name is replaced, and a folder that is a checkpoint.
        check: as for :func:`begin`; it is asked again, since something may have come there meanwhile.

    Raises:
        CheckpointError: ``staging`` has gone, or what is there must not be replaced.
    """
    if not os.path.lexists(staging):
        raise CheckpointError(
            f"{target} cannot be saved: {staging.name}, to which it was written, has been deleted meanwhile. Do not "
            "delete hidden files of a folder that a run saves to, and let one run only save there."
        )
    sync(staging)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            check(target)
            _put(staging, target)
            break
        except OSError as error:
            # A reader has recovered the old one just now, since it was missing for a moment.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR) or attempt == _ATTEMPTS:
                raise
    _sync_one(target.parent)
    _forget_replaced(target)


@contextlib.contextmanager
def replacing(target: Path, *, is_folder: bool, check: Check = check_replaceable) -> Iterator[Path]:
    """Between :func:`begin` and :func:`commit`; what is there of it is deleted after an error.

    Raises:
        CheckpointError: it could not be written, as the disk is full for instance.
    """
    with saving(target):
        staging = begin(target, is_folder=is_folder, check=check)
        try:
            yield staging
            commit(staging, target, check=check)
        except BaseException:
            discard(staging)
            raise


def discard(staging: Path) -> None:
    """Delete what :func:`begin` has made, if it is still there."""
    _delete(staging)


def remove(target: Path) -> None:
    """Delete a file, a link or a folder, which is there as a whole or not at all meanwhile; and an older one of it."""
    _forget_replaced(target)
    if os.path.lexists(target):
        _hide_and_delete(target, target)


def link(target: Path, place: Path) -> None:
    """Let ``place`` be a symbolic link to ``target``, as a path from there; what was there before is replaced."""
    check_replaceable(place)
    staging = _mine(place, "saving")
    staging.symlink_to(os.path.relpath(target, place.parent))
    try:
        if place.is_dir() and not place.is_symlink():
            remove(place)
        os.replace(staging, place)
    finally:
        _delete(staging)
    _sync_one(place.parent)


def recover(target: Path) -> None:
    """Put back what a process had moved aside for its new ``target`` when it was killed. Any process may do that."""
    if (old := _replaced(target)) is None:
        return
    if not os.path.lexists(target):
        with contextlib.suppress(OSError):  # another process does it as well, or the new one arrives
            os.rename(old, target)
            _sync_one(target.parent)


def recover_all(folder: Path) -> None:
    """:func:`recover` everything that is missing in ``folder``, before it is listed."""
    if folder.is_dir():
        for each in list(folder.iterdir()):
            if match := _REPLACED.fullmatch(each.name):
                recover(folder / match[1])


def clean(folder: Path, *, now: float | None = None) -> None:
    """Delete what dead processes have left in ``folder``.

    Args:
        folder: is there.
        now: the time on the machine that has the files, in seconds; by default it is this machine's.
    """
    now = time.time() if now is None else now
    for each in list(folder.iterdir()):
        if (match := _HIDDEN.fullmatch(each.name)) and not _is_alive(each, match, now):
            _delete(each)


def merge(staging: Path, target: Path) -> None:
    """Move what is in the folder ``staging`` into ``target``, which is there and keeps its other files.

    One file after the other, each of them is there as a whole: for folders that cannot be replaced, because they are
    mounted or have files of others.
    """
    sync(staging)
    _merge(staging, target)


def sync(path: Path) -> None:
    """Bring a file, or everything in a folder, to the disk."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            each = Path(folder, name)
            if not each.is_symlink():
                _sync_one(each)
        _sync_one(Path(folder))
        os.utime(path)  # it is not given up, though it has many files
    if not path.is_dir():
        _sync_one(path)


def _put(staging: Path, target: Path) -> None:
    if staging.is_dir() or (target.is_dir() and not target.is_symlink()):
        _forget_replaced(target)
        if os.path.lexists(target):
            os.rename(target, _aside(target))
            _sync_one(target.parent)
        os.rename(staging, target)
    else:
        os.replace(staging, target)


def _merge(source: Path, target: Path) -> None:
    for each in sorted(source.iterdir()):
        there = target / each.name
        if each.is_dir() and there.is_dir() and not there.is_symlink():
            _merge(each, there)
        else:
            os.replace(each, there)
    _sync_one(target)


def _forget_replaced(target: Path) -> None:
    """What was there before ``target``; half of it must not be found when this process is killed now."""
    recover(target)
    if (old := _replaced(target)) is not None:
        _hide_and_delete(old, target)


def _hide_and_delete(path: Path, target: Path) -> None:
    hidden = _mine(target, "deleted")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, hidden)
    _sync_one(target.parent)
    _delete(hidden)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_one(folder.parent)


def _sync_one(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # some file systems do not know it of folders
            raise
    finally:
        os.close(number)


def _aside(target: Path) -> Path:
    return target.with_name(f".{_short(target.name)}.replaced")


def _replaced(target: Path) -> Path | None:
    path = _aside(target)
    return path if os.path.lexists(path) else None


def _mine(target: Path, what: str) -> Path:
    pid = os.getpid()
    # Lightning takes whatever has `hpc_ckpt_` in its name for a checkpoint of that name, and digits for its number.
    shown = _short(target.name).replace("_", "-")
    for number in itertools.count():
        path = target.with_name(f".{shown}.{what}-{_machine()}-{pid}-{_started(pid)}-{number}")
        if not os.path.lexists(path):
            return path
    raise AssertionError


def _short(name: str) -> str:
    encoded = name.encode()
    if len(encoded) <= _LONGEST_NAME:
        return name
    return encoded[: _LONGEST_NAME // 2].decode(errors="ignore") + "~" + hashlib.sha1(encoded).hexdigest()


def _is_alive(path: Path, match: re.Match[str], now: float) -> bool:
    if match[1] == _machine():
        return _started(int(match[2])) == match[3]
    try:
        times = [path.lstat().st_mtime, *(each.lstat().st_mtime for each in path.rglob("*"))]
    except OSError:  # it is being renamed or deleted
        return True
    return now - max(times) < GIVEN_UP_SECONDS


def _machine() -> str:
    """Of processes with the same, the numbers mean the same: they are on one machine, since one start of it, in one
    container."""
    known = [platform.node()]
    with contextlib.suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        known.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha1("/".join(known).encode()).hexdigest()[:8]


def _started(pid: int) -> str:
    """When a process was started, in ticks of the machine; empty if it is none, or has ended."""
    try:
        # The second field, the name of the program, is in parentheses and may have anything in it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
        return _is_there(pid)
    return "" if fields[0] in "ZX" else fields[19]


def _is_there(pid: int) -> str:
    """For systems without ``/proc``: a later process with the same number is taken for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "0"
