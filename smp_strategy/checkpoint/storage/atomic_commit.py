"""Atomic replacement of a file or folder: after a crash at any moment, the old one or the new one is there as a whole.

[Note: atomic replacement] The new one is written beside its place, under a hidden name [1], synced to disk, renamed
[2], and the rename is synced. Renaming a file over another is one step. A folder cannot be renamed over another: the
old one is moved aside first [3], and deleted when the new one is in place [4]::

        in its place    hidden beside it
    [1] x.ckpt (old)    .x.ckpt.saving-...
    [3]                 .x.ckpt.saving-...   .x.ckpt.replaced (old)
    [2] x.ckpt (new)                         .x.ckpt.replaced (old)
    [4] x.ckpt (new)                         .x.ckpt.deleted-...

A crash after [3] leaves the old one to :func:`recover`, which must be called before ``x.ckpt`` is read. A crash
elsewhere leaves a hidden entry, which the next :func:`begin` in that folder deletes. Entries in use by a live process
are spared: the hidden name has the machine, the process id and the start time of the process. An entry of another
machine, whose processes cannot be checked, is spared as long as it was written to within ``GIVEN_UP_SECONDS``.

At an address nothing can be renamed: :mod:`~smp_strategy.checkpoint.storage.remote_commit`.

A folder that is mounted, or has files of others, is not replaced: files are moved into it one after the other
(:func:`merge`). They come from a hidden folder in it, which has all that is to be done: from the moment when it is
there, :func:`recover` does the rest after a crash.

A single process begins and commits; others may write to the entry that it has begun, on other machines as well.

If a save fails, the error says the path, the reason, and that older checkpoints are untouched (:func:`saving`). The
system's own errors say none of that if a disk is full, and libraries that write files turn them into others.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, overload

from smp_strategy.checkpoint.storage import remote_commit
from smp_strategy.checkpoint.storage.path_kind import check_folder, check_replaceable
from smp_strategy.checkpoint.storage.process_marks import MARK, is_known_alive, mark
from smp_strategy.checkpoint.storage.remote_path import AnyPath, RemotePath
from smp_strategy.errors import CheckpointError, SMPError, cause_of, is_of_disk

__all__ = [
    "begin",
    "clean",
    "commit",
    "discard",
    "hidden_beside",
    "link",
    "merge",
    "readable",
    "recover",
    "recover_all",
    "remove",
    "replacing",
    "sync",
    "BEFORE",
    "saving",
]


# An entry of another machine without writes for so long belongs to a dead process.
GIVEN_UP_SECONDS: Final = 3600.0
_MERGED_SECONDS: Final = 60.0

_HIDDEN: Final = re.compile(rf"\..+\.(?:saving|deleted)-{MARK}-\d+")
_MERGING: Final = re.compile(rf"\..+\.merging-{MARK}-\d+")
# File with the names of what becomes out of date, in a folder that is merged.
_STALE: Final = ".stale"
_REPLACED: Final = re.compile(r"\.(.+)\.replaced")
_LONGEST_NAME: Final = 180  # bytes, of 255 of a file name: prefix and suffix need the rest
_NO_SYNC: Final = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
_CONTESTED: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOENT)
_ATTEMPTS: Final = 5

Check = Callable[[AnyPath], None]


def hidden_beside(target: Path) -> Path:
    """Name for what this process will write to ``target``: nobody else uses it, and :func:`clean` knows it."""
    return _mine(target, "saving")


@overload
def begin(target: Path, *, is_folder: bool, check: Check = check_replaceable) -> Path: ...


@overload
def begin(target: AnyPath, *, is_folder: bool, check: Check = check_replaceable) -> AnyPath: ...


def begin(target: AnyPath, *, is_folder: bool, check: Check = check_replaceable) -> AnyPath:
    """Make an empty file or folder beside ``target``, to be filled and given to :func:`commit` or :func:`discard`.

    Missing parent folders are made. Entries that dead processes have left in the folder are deleted.

    Args:
        target: Path to be written.
        is_folder: Whether it is a folder.
        check: Raises an error if the existing ``target`` must not be replaced.

    Raises:
        ConfigError: ``target`` is below a file, a device, a FIFO or a socket.
    """
    if isinstance(target, RemotePath):
        assert is_folder, "files at addresses are written by plugins"
        return remote_commit.begin(target, check)
    recover(target)
    check(target)
    check_folder(target.parent)
    _make_folder(target.parent)
    staging = _mine(target, "saving")
    if is_folder:
        staging.mkdir()
    else:
        staging.touch(exist_ok=False)
    clean(target.parent, now=staging.stat().st_mtime)
    return staging


def commit(staging: AnyPath, target: AnyPath, *, check: Check = check_replaceable) -> None:
    """Replace ``target`` by ``staging``, which is gone then; all of it is synced to disk when this returns.

    Args:
        staging: Path from :func:`begin`, complete and closed.
        target: As for :func:`begin`. A file or link of that name is replaced, and a folder that is a checkpoint.
        check: As for :func:`begin`; called again, since ``target`` may have appeared meanwhile.

    Raises:
        CheckpointError: ``staging`` has gone, or the existing ``target`` must not be replaced.
    """
    if isinstance(staging, RemotePath) or isinstance(target, RemotePath):
        assert isinstance(staging, RemotePath)
        assert isinstance(target, RemotePath)
        remote_commit.commit(staging, target, check)
        return
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
            # Between [3] and [2] a reader has recovered the old one, as it was missing: move it aside again. Or before
            # [3] another process, which saves here as well, has moved it aside.
            if error.errno not in _CONTESTED or attempt == _ATTEMPTS:
                raise
    _sync_one(target.parent)
    _forget_replaced(target)


@contextlib.contextmanager
def replacing(target: Path, *, is_folder: bool, check: Check = check_replaceable) -> Iterator[Path]:
    """Context manager around :func:`begin` and :func:`commit`; after an error the new file or folder is deleted.

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


def discard(staging: AnyPath) -> None:
    """Delete the file or folder of :func:`begin`, if it is still there."""
    if isinstance(staging, RemotePath):
        remote_commit.discard(staging)
    else:
        _delete(staging)


def remove(target: AnyPath) -> None:
    """Delete a file, a link or a folder atomically, and an older one that was moved aside for it."""
    if isinstance(target, RemotePath):
        remote_commit.remove(target)
        return
    _forget_replaced(target)
    if os.path.lexists(target):
        _hide_and_delete(target, target)


def link(target: Path, place: Path) -> None:
    """Make ``place`` a symbolic link to ``target`` by a relative path; an existing ``place`` is replaced."""
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
    """Put back the old ``target`` that a process had moved aside when it was killed, or end its :func:`merge`.

    Any process may call this.
    """
    if not target.name:  # the root, or this folder, which nothing replaces
        return
    if target.is_dir():
        for each in sorted(target.iterdir()):
            # On another machine, too, a merge takes no minute.
            now = time.time() + GIVEN_UP_SECONDS - _MERGED_SECONDS
            if (match := _MERGING.fullmatch(each.name)) and not _is_alive(each, match, now):
                with contextlib.suppress(OSError):  # another process does it, or this one may only read
                    mine = _mine(target / target.name, "merging")
                    os.rename(each, mine)
                    _end_merge(mine, target)
    if (old := _replaced(target)) is None:
        return
    if not os.path.lexists(target):
        with contextlib.suppress(OSError):  # another process recovers it too, or the new one arrives
            os.rename(old, target)
            _sync_one(target.parent)


def readable(target: AnyPath) -> AnyPath:
    """Call :func:`recover`, and return the file or folder to read: that of a commit object at an address."""
    if isinstance(target, RemotePath):
        return remote_commit.data_of(target) or target
    recover(target)
    return target


def recover_all(folder: AnyPath) -> None:
    """Call :func:`recover` for everything that is missing in ``folder``, before it is listed."""
    if isinstance(folder, Path) and folder.is_dir():
        for each in list(folder.iterdir()):
            if match := _REPLACED.fullmatch(each.name):
                recover(folder / match[1])


def clean(folder: Path, *, now: float | None = None) -> None:
    """Delete the entries that dead processes have left in ``folder``.

    Args:
        folder: Existing folder.
        now: Time on the machine that has the files, in seconds; by default this machine's.
    """
    now = time.time() if now is None else now
    for each in list(folder.iterdir()):
        if (match := _HIDDEN.fullmatch(each.name)) and not _is_alive(each, match, now):
            _delete(each)


def merge(staging: Path, target: Path, *, stale: Collection[str] = ()) -> None:
    """Move the content of the folder ``staging`` into the existing folder ``target``, which keeps its other files.

    Files are moved one by one, each of them atomically, in the order of names: for folders that cannot be replaced,
    because they are mounted or have files of others. After a crash in the midst, :func:`recover` moves the others.

    Args:
        staging: On the file system of ``target``; it is gone afterwards.
        target: Existing folder.
        stale: Names of files and folders in ``target`` that become out of date; they are deleted first.

    Raises:
        CheckpointError: a file would replace a device, a FIFO, a socket, or a folder of others.
    """
    files = (str(each.relative_to(staging)) for each in staging.rglob("*") if not each.is_dir())
    for name in (*files, *stale):
        check_replaceable(target / name)
    (staging / _STALE).write_text(json.dumps(sorted(stale)))
    sync(staging)
    merging = _mine(target / target.name, "merging")
    os.rename(staging, merging)
    _sync_one(target)
    _end_merge(merging, target)


def sync(path: Path) -> None:
    """Sync a file, or everything in a folder, to disk."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            each = Path(folder, name)
            if not each.is_symlink():
                _sync_one(each)
        _sync_one(Path(folder))
        os.utime(path)  # a sign of life for other machines, as syncing many files takes long
    if not path.is_dir():
        _sync_one(path)


def _put(staging: Path, target: Path) -> None:
    if staging.is_dir() or (target.is_dir() and not target.is_symlink()):
        _forget_replaced(target)
        if os.path.lexists(target):
            os.rename(target, _aside(target))  # [3]
            # Synced between the renames, so that they reach the disk in this order.
            _sync_one(target.parent)
        os.rename(staging, target)  # [2]
    else:
        os.replace(staging, target)


def _end_merge(merging: Path, target: Path) -> None:
    if (stale := merging / _STALE).exists():
        for name in json.loads(stale.read_text()):
            remove(target / name)
        _sync_one(target)
        stale.unlink()  # new files may have these names
    _merge(merging, target)
    _delete(merging)


def _merge(source: Path, target: Path) -> None:
    for each in sorted(source.iterdir()):
        there = target / each.name
        if each.is_dir() and there.is_dir() and not there.is_symlink():
            _merge(each, there)
        else:
            os.replace(each, there)
    _sync_one(target)


def _forget_replaced(target: Path) -> None:
    """Delete the old version of ``target`` that was moved aside, so that a crash meanwhile leaves no half of it to be
    found."""
    recover(target)
    if (old := _replaced(target)) is not None:
        _hide_and_delete(old, target)


def _hide_and_delete(path: Path, target: Path) -> None:
    hidden = _mine(target, "deleted")  # [4]: deleting takes long, and half of a folder must not be found
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
        if error.errno not in _NO_SYNC:  # some file systems cannot sync folders
            raise
    finally:
        os.close(number)


def _aside(target: Path) -> Path:
    return target.with_name(f".{_short(target.name)}.replaced")


def _replaced(target: Path) -> Path | None:
    path = _aside(target)
    return path if os.path.lexists(path) else None


def _mine(target: Path, what: str) -> Path:
    # Lightning takes any name with `hpc_ckpt_` for a checkpoint, and the digits in it for its number.
    shown = _short(target.name).replace("_", "-")
    for number in itertools.count():
        path = target.with_name(f".{shown}.{what}-{mark()}-{number}")
        if not os.path.lexists(path):
            return path
    raise AssertionError


def _short(name: str) -> str:
    encoded = os.fsencode(name)
    if len(encoded) <= _LONGEST_NAME:
        return name
    return encoded[: _LONGEST_NAME // 2].decode(errors="ignore") + "~" + hashlib.sha1(encoded).hexdigest()


def _is_alive(path: Path, match: re.Match[str], now: float) -> bool:
    if (is_alive := is_known_alive(match)) is not None:
        return is_alive
    try:
        times = [path.lstat().st_mtime, *(each.lstat().st_mtime for each in path.rglob("*"))]
    except OSError:  # being renamed or deleted just now
        return True
    return now - max(times) < GIVEN_UP_SECONDS


BEFORE: Final = "checkpoints that were there before are untouched."


@contextmanager
def saving(target: AnyPath) -> Iterator[None]:
    """Context in which an error of the disk becomes an error of saving ``target``; others stay as they are.

    Raises:
        CheckpointError: in place of an error of the disk.
    """
    try:
        yield
    except SMPError:
        raise
    except Exception as error:
        if not is_of_disk(error):
            raise
        cause = cause_of(error, target if isinstance(target, Path) else None)
        raise CheckpointError(f"{target} was not saved: {cause} {BEFORE.capitalize()}") from error
