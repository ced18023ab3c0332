"""Asynchronous saves: checkpoints are written in the background, and follow-up actions wait for the files.

With ``async_save``, a program continues before the checkpoint exists. It would delete the previous one too early, link
to a missing file, consider the name free, and announce the file to loggers. So these actions are deferred: file
operations run on global rank 0 after the write, in the order of the calls; loggers are told from the main thread. If a
save fails, its actions are dropped, so the previous checkpoint stays.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, final

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage.async_save import BackgroundSave
from smp_strategy.checkpoint.storage.full_file import write_full
from smp_strategy.checkpoint.storage.remote_path import AnyPath, any_path, local_path
from smp_strategy.distributed.rendezvous import alike
from smp_strategy.engine.saving.checkpointing import SavedState

__all__ = ["AsyncSaves"]

Target: TypeAlias = AnyPath | os.PathLike[str] | str
"""Path or address of a checkpoint."""


@final
class AsyncSaves:
    """Checkpoint writer of a run, perhaps in the background, and actions that wait for the save in flight."""

    def __init__(self, *, in_background: bool = True) -> None:
        self._background = BackgroundSave()
        self.in_background = in_background
        # Whether each path will exist after all deferred actions.
        self._foreseen: dict[AnyPath, bool] = {}
        self._announcements: list[Callable[[], None]] = []

    def save(self, path: Target, write: Callable[[], None]) -> None:
        """Write the checkpoint ``path`` by calling ``write``, after the save in flight."""
        self.wait()
        if not self.in_background:
            write()
            return
        self._foreseen[_absolute(path)] = True
        self._background.start(write, str(path))

    def save_full(self, path: Target, content: Mapping[str, Any]) -> None:
        """Write a file of ``torch.save``, on a single rank; ``content`` must not change any more."""
        place = local_path(path)
        self.save(place, lambda: write_full(place, content))

    def save_sharded(
        self, saved: SavedState, path: Target, state: Mapping[str, Any], *, rest: Mapping[str, Any], note: Any
    ) -> None:
        """Write a directory; ``rest``, which global rank 0 writes, must not change any more. Collective."""
        self.wait()
        place, prepared = any_path(path), saved.prepared(state, copy=self.in_background)
        self.save(place, lambda: prepared.write(place, rest=rest, note=note))

    def remove(self, path: Target, how: Callable[[], None] | None = None) -> None:
        """Remove a checkpoint of either form after the save in flight, perhaps by the user's ``CheckpointIO``
        (``how``). On a single rank.
        """
        self._later(how or (lambda: commit.remove(any_path(path))), path, leaves=False)

    def link(self, target: Target, link: Target) -> None:
        """Point ``link`` to the checkpoint ``target`` after the save in flight; local paths. On a single rank."""
        there, place = any_path(target), any_path(link)
        assert isinstance(there, Path), "local files only are linked"
        assert isinstance(place, Path)
        if _absolute(there) != _absolute(place):
            self._later(lambda: commit.link(there, place), place, leaves=True)

    def announce(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` on the main thread after the save in flight."""
        self._announcements.append(tell)
        self.check()

    def exists(self, path: Target) -> bool:
        """Whether ``path`` will exist after all deferred actions."""
        return self._foreseen.get(_absolute(path), any_path(path).exists())

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

    def wait_together(self) -> None:
        """Wait for the save in flight; if it failed on any rank, raise on all. Collective."""
        with alike("saving in the background"):
            self.wait()

    def end(self, *, failed: bool) -> None:
        """Wait for the save in flight, whose error becomes a warning if the run has ``failed``; later saves are
        synchronous.
        """
        self.in_background = False
        try:
            self.wait()
        except Exception as error:
            if not failed:
                raise
            warnings.warn(f"A checkpoint was not saved: {error}", stacklevel=2)

    def _later(self, action: Callable[[], None], path: Target, *, leaves: bool) -> None:
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


def _absolute(target: Target) -> AnyPath:
    path = any_path(target)
    if not isinstance(path, Path):
        return path
    return Path(os.path.abspath(path))  # not `resolve`, which would follow links
