"""Atomic replacement of a sharded checkpoint at an address (``s3://bucket/run/x.ckpt``) by a commit object.

Storages of objects cannot rename a folder. So the files of a save get a folder of their own, and a small object under
the name of the checkpoint, written last, names it::

    s3://bucket/run/x.ckpt                                   the commit object
    s3://bucket/run/.sharded/x.ckpt/<mark>-<number>/         the folder, as on a disk: .metadata, manifest.json, ...

Without the commit object there is no checkpoint, for whoever looks for ``x.ckpt`` or lists the folder. A new version is
written beside the old one, whose folder is deleted when the commit object names the new one. After a crash, a folder
that no commit object names is left. The next :func:`begin` deletes it, if its process is known to be dead, or, of
another machine, if nothing was written for ``GIVEN_UP_SECONDS``: an object of many gigabytes appears when all of it is
there. All commit objects beside each other are asked, so that a copy of one under another name keeps its files.

A storage of objects has the old commit object or the new one at any time, and so has this machine, where it is renamed.
A file system elsewhere (``sftp``, ``hdfs``) may be left with the beginning of one, or with an empty file. That is no
checkpoint, and as long as it is there no folder is deleted: the old version and the new one are complete.
"""

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from smp_strategy.checkpoint.storage.manifest import digest, is_plain_name
from smp_strategy.checkpoint.storage.process_marks import MARK, is_known_alive, mark
from smp_strategy.checkpoint.storage.remote_path import RemotePath
from smp_strategy.errors import DamagedError

__all__ = ["begin", "commit", "data_of", "discard", "is_commit_object", "remove"]

GIVEN_UP_SECONDS: Final = 24 * 3600.0
FOLDER: Final = ".sharded"
FORMAT: Final = "smp_strategy sharded checkpoint at an address"
VERSION: Final = 1
_MOST_BYTES: Final = 4096  # of a commit object
_BEGINNING: Final = json.dumps({"format": FORMAT}).encode()[:-1]
_SAVE: Final = re.compile(rf"{MARK}-\d+")

Check = Callable[[RemotePath], None]


def begin(target: RemotePath, check: Check) -> RemotePath:
    """Choose the folder of a save, and delete those that dead processes have left beside ``target``."""
    check(target)
    clean(target.parent)
    return target.parent / FOLDER / target.name / f"{mark()}-{time.time_ns()}"


def commit(staging: RemotePath, target: RemotePath, check: Check) -> None:
    """Let ``target`` be the checkpoint in ``staging``, which is complete, and delete the one that it was.

    Raises:
        CheckpointError: ``target`` must not be replaced.
    """
    check(target)
    old = data_of(target)
    data = f"{target.name}/{staging.name}"
    content = {"format": FORMAT, "version": VERSION, "data": data, "digest": digest(data.encode())}
    target.put(json.dumps(content).encode())
    _delete_unnamed(old)


def discard(staging: RemotePath) -> None:
    """Delete the folder of a save, unless it has been committed."""
    _delete_unnamed(staging)


def remove(target: RemotePath) -> None:
    """Delete a checkpoint: first its commit object, so that half of it is not found; or an object of another kind."""
    old = data_of(target)
    target.unlink()
    _delete_unnamed(old)


def clean(parent: RemotePath) -> None:
    """Delete the folders of saves that dead processes have left."""
    kept = parent / FOLDER
    if not kept.is_dir():
        return
    objects = kept.rglob("*")
    saves = itertools.groupby(objects, lambda each: each.parent)
    named, now = _named(parent), time.time()
    for save, inside in saves:
        match = _SAVE.fullmatch(save.name)
        if named is None or save in named or match is None or save.parent.parent != kept:
            continue
        is_alive = is_known_alive(match)
        if is_alive is None:
            is_alive = now - max(each.stat().st_mtime for each in inside) < GIVEN_UP_SECONDS
        if not is_alive:
            save.delete_all()


def data_of(target: RemotePath) -> RemotePath | None:
    """The folder that the commit object ``target`` names; ``None``: there is no commit object.

    Raises:
        DamagedError: it is damaged.
    """
    try:
        with target.open() as file:
            data = file.read(_MOST_BYTES)
    except (FileNotFoundError, IsADirectoryError):
        return None
    return _data_in(target, data)


def is_commit_object(data: bytes) -> bool:
    """Whether a file that begins with ``data`` is a commit object."""
    return FORMAT.encode() in data[: 2 * len(FORMAT)]


def _data_in(target: RemotePath, data: bytes) -> RemotePath | None:
    if not is_commit_object(data):
        return None
    try:
        content: Mapping[str, Any] = json.loads(data)
        inside = content["data"]
        folders = inside.split("/")
        is_whole = digest(inside.encode()) == content["digest"] and len(folders) == 2
        if not is_whole or not all(map(is_plain_name, folders)) or content["version"] != VERSION:
            raise ValueError("its digest differs, or it is of a later version")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{target}, the commit object of a sharded checkpoint, is damaged: {error}.") from error
    return target.parent / FOLDER / folders[0] / folders[1]


def _named(parent: RemotePath) -> set[RemotePath | None] | None:
    """The folders that commit objects name; ``None``: one is damaged, and may name any."""
    objects = parent.small_objects(_MOST_BYTES)
    if any(_BEGINNING.startswith(data) and (parent / FOLDER / each.name).is_dir() for each, data in objects.items()):
        return None
    try:
        return {_data_in(each, data) for each, data in objects.items()}
    except DamagedError:
        return None


def _delete_unnamed(data: RemotePath | None) -> None:
    if data is not None and (named := _named(data.parent.parent.parent)) is not None and data not in named:
        data.delete_all()
