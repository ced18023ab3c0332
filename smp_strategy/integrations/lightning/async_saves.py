"""Asynchronous saves: checkpoints are written in the background, and follow-up actions wait for the files.

With ``async_save``, Lightning continues before the checkpoint exists. It would delete the previous one too early, link
to a missing file, consider the name free, and announce the file to loggers. :class:`AsyncSaves` defers these actions:
file operations run on global rank 0 after the write, in the order of the calls; loggers are told from the main thread.
If a save fails, its actions are dropped, so the previous checkpoint stays.

:class:`KeptCheckpoints` patches callbacks and loggers to do so. It also replaces links atomically: Lightning removes
the old link first, and a run that is killed in between has no last checkpoint.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage.async_save import BackgroundSave
from smp_strategy.checkpoint.storage.remote_path import Place, place_of
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.patching import Patches

__all__ = ["KeptCheckpoints", "AsyncSaves"]


@final
class AsyncSaves:
    """Checkpoint writer of a run, with a queue of actions that wait for the save in flight.

    Args:
        group: returns a host process group of all ranks, used for nothing else.
        in_background: whether training continues while files are written.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup], *, in_background: bool) -> None:
        self._writer = ShardedWriter(group)
        self._background = BackgroundSave()
        self.in_background = in_background
        # Whether each path will exist after all deferred actions.
        self._foreseen: dict[Place, bool] = {}
        self._announcements: list[Callable[[], None]] = []

    def save(self, path: Place, write: Callable[[], None]) -> None:
        """Write the checkpoint ``path`` by calling ``write``, after the save in flight."""
        self.wait()
        if not self.in_background:
            write()
            return
        self._foreseen[_absolute(path)] = True
        self._background.start(write, str(path))

    def save_sharded(self, path: Place, state: Mapping[str, Any], *, rest: Mapping[str, Any], note: Any) -> None:
        """Write a directory. Collective.

        Args:
            path: the directory, or its address.
            state: this rank's part, see :class:`~smp_strategy.checkpoint.storage.writer.ShardedWriter`.
            rest: everything else, written by global rank 0; it must not change any more.
            note: information for people and tools, in the manifest.
        """
        self.wait()
        prepared = self._writer.prepare(state, copy=self.in_background)
        self.save(path, lambda: prepared.write(path, rest=rest, note=note))

    def remove(self, path: Place, how: Callable[[], None] | None = None) -> None:
        """Remove a checkpoint of either form after the save in flight. On a single rank.

        Args:
            path: the checkpoint.
            how: removes it instead, e.g. the user's ``CheckpointIO``.
        """
        self._later(how or (lambda: commit.remove(path)), path, leaves=False)

    def link(self, target: Path, link: Path) -> None:
        """Point ``link`` to the checkpoint ``target`` after the save in flight. On a single rank."""
        if _absolute(target) != _absolute(link):
            self._later(lambda: commit.link(target, link), link, leaves=True)

    def announce(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` on the main thread after the save in flight."""
        self._announcements.append(tell)
        self.check()

    def exists(self, path: Place) -> bool:
        """Whether ``path`` will exist after all deferred actions."""
        return self._foreseen.get(_absolute(path), path.exists())

    def check(self) -> None:
        """Raise the error of a failed save, or make the announcements of a completed one."""
        with self._forgetting():
            self._background.check()
        if not self._background.is_busy:
            self._settle()

    def wait(self) -> None:
        """Wait for the save in flight and its actions; raise the error of a failed save."""
        with self._forgetting():
            self._background.wait()
        self._settle()

    def end(self, *, failed: bool) -> None:
        """Wait for the save in flight; later saves are synchronous.

        Args:
            failed: whether the run ends with an error; then the error of a save becomes a warning.
        """
        self.in_background = False
        try:
            self.wait()
        except Exception as error:
            if not failed:
                raise
            warnings.warn(f"A checkpoint was not saved: {error}", stacklevel=2)

    def _later(self, action: Callable[[], None], path: Place, *, leaves: bool) -> None:
        if self._background.is_busy:
            self._foreseen[_absolute(path)] = leaves
        self._background.after(action)

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Drop announcements and expectations if a save has failed."""
        try:
            yield
        except BaseException:
            self._foreseen.clear()
            self._announcements.clear()
            raise

    def _settle(self) -> None:
        self._foreseen.clear()
        announcements, self._announcements = self._announcements, []
        for tell in announcements:
            tell()


def _absolute(path: Place) -> Place:
    if not isinstance(path, Path):
        return path
    return Path(os.path.abspath(path))  # not `resolve`, which would follow links


@final
class KeptCheckpoints:
    """Patches the callbacks and loggers of a run, on the instances, to respect saves in flight.

    Args:
        saves: the checkpoint writer.
    """

    def __init__(self, saves: AsyncSaves) -> None:
        self._saves = saves
        self._callbacks: list[Any] = []
        self._patches = Patches()

    def install(self, callbacks: Iterable[Any], loggers: Iterable[Any]) -> None:
        """Replace the methods."""
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            self._replace(callback, "_link_checkpoint", self._linking)
            if self._saves.in_background:
                self._replace(callback, "file_exists", self._looking)
        for logger in loggers if self._saves.in_background else ():
            self._replace(logger, "after_save_checkpoint", self._announcing)

    def remove(self) -> None:
        """Restore the methods."""
        self._patches.give_back()

    def _replace(self, owner: Any, name: str, stand_in: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if callable(original) and name not in vars(owner):
            self._patches.put(owner, name, stand_in(original))

    def _linking(self, original: Any) -> Any:
        def link(trainer: Any, filepath: Any, linkpath: Any) -> None:
            target, place = place_of(filepath), place_of(linkpath)
            assert isinstance(target, Path), "Lightning links local files only"
            assert isinstance(place, Path)
            if trainer.is_global_zero:
                self._saves.link(target, place)
            trainer.strategy.barrier()

        return link

    def _looking(self, original: Any) -> Any:
        def file_exists(filepath: Any, trainer: Any) -> bool:
            is_there = trainer.is_global_zero and self._saves.exists(place_of(filepath))
            return bool(trainer.strategy.reduce_boolean_decision(is_there, all=False))

        return file_exists

    def _announcing(self, original: Any) -> Any:
        def after_save_checkpoint(callback: Any) -> None:
            now = _as_it_is(next((each for each in self._callbacks if each == callback), callback))
            self._saves.announce(lambda: original(now))

        return after_save_checkpoint


def _as_it_is(callback: Any) -> Any:
    """A snapshot of a callback, which may describe the next checkpoint by the time the logger reads it."""
    copied = copy.copy(callback)
    for name, value in vars(copied).items():
        if isinstance(value, dict):
            vars(copied)[name] = dict(value)
    return copied
