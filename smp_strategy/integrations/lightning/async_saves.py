"""How the checkpoints of a run become files, now or beside the training, and what waits until they are there.

With ``async_save`` a checkpoint is not there yet when Lightning goes on, which therefore would delete the one before
too early, link to nothing, take its name for free, and tell loggers of a file that they do not find. All of that waits
here: for the files on global rank 0, in the order in which it was asked for, and for loggers until the main thread
comes by. If a save fails nothing of it happens, so that the checkpoint before stays.

What callbacks that keep checkpoints, and loggers that are told of them, do with files that are not there yet.

:class:`AsyncSaves` lets it wait. On the way a link gets its new target at once: Lightning removes the old link first,
and a run that is killed in between has no last checkpoint.
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
from smp_strategy.checkpoint.storage.writer import ShardedWriter

__all__ = ["KeptCheckpoints", "AsyncSaves"]


@final
class AsyncSaves:
    """See the module docstring.

    Args:
        group: all ranks, on the host; nobody else uses it.
        in_background: whether training goes on while files are written.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup], *, in_background: bool) -> None:
        self._writer = ShardedWriter(group)
        self._background = BackgroundSave()
        self.in_background = in_background
        # What will be there, or will not, when everything that waits is done.
        self._foreseen: dict[Path, bool] = {}
        self._announcements: list[Callable[[], None]] = []

    def save(self, path: Path, write: Callable[[], None]) -> None:
        """Let ``write`` make the checkpoint ``path``, after the one in flight."""
        self.wait()
        if not self.in_background:
            write()
            return
        self._foreseen[_absolute(path)] = True
        self._background.start(write, str(path))

    def save_sharded(self, path: Path, state: Mapping[str, Any], *, rest: Mapping[str, Any], note: Any) -> None:
        """Write a directory. Collective.

        Args:
            path: the directory.
            state: what this rank has, see :class:`~smp_strategy.checkpoint.storage.writer.ShardedWriter`.
            rest: everything else, which global rank 0 writes; nobody changes it any more.
            note: for people and tools, in the manifest.
        """
        self.wait()
        prepared = self._writer.prepare(state, copy=self.in_background)
        self.save(path, lambda: prepared.write(path, rest=rest, note=note))

    def remove(self, path: Path, how: Callable[[], None] | None = None) -> None:
        """Remove a checkpoint, once the one in flight is there. On one rank.

        Args:
            path: of either form.
            how: if that is for somebody else to do.
        """
        self._later(how or (lambda: commit.remove(path)), path, leaves=False)

    def link(self, target: Path, link: Path) -> None:
        """Let ``link`` lead to the checkpoint ``target``, once that is there. On one rank."""
        if _absolute(target) != _absolute(link):
            self._later(lambda: commit.link(target, link), link, leaves=True)

    def announce(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` on the main thread, once the checkpoint in flight is there."""
        self._announcements.append(tell)
        self.check()

    def exists(self, path: Path) -> bool:
        """Whether ``path`` is taken once everything that waits is done."""
        return self._foreseen.get(_absolute(path), path.exists())

    def check(self) -> None:
        """Raise the error of a save that has failed meanwhile, and make announcements."""
        with self._forgetting():
            self._background.check()
        if not self._background.is_busy:
            self._settle()

    def wait(self) -> None:
        """Until everything is there, or an error is raised."""
        with self._forgetting():
            self._background.wait()
        self._settle()

    def end(self, *, failed: bool) -> None:
        """Wait, for nobody comes by any more; from now on saves are over when their call returns.

        Args:
            failed: the run ends with an error, which is more important than one of a save.
        """
        self.in_background = False
        try:
            self.wait()
        except Exception as error:
            if not failed:
                raise
            warnings.warn(f"A checkpoint was not saved: {error}", stacklevel=2)

    def _later(self, action: Callable[[], None], path: Path, *, leaves: bool) -> None:
        if self._background.is_busy:
            self._foreseen[_absolute(path)] = leaves
        self._background.after(action)

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """What was to be is not, if a save has failed."""
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


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # links are names of their own


@final
class KeptCheckpoints:
    """Stands in for methods of the callbacks and loggers of one run, on the instances.

    Args:
        saves: writes what they keep.
        local: the path of a file that the operating system knows, else ``None``.
    """

    def __init__(self, saves: AsyncSaves, local: Callable[[Any], Path | None]) -> None:
        self._saves = saves
        self._local = local
        self._callbacks: list[Any] = []
        self._replaced: list[tuple[Any, str]] = []

    def install(self, callbacks: Iterable[Any], loggers: Iterable[Any]) -> None:
        """Replace them."""
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            self._replace(callback, "_link_checkpoint", self._linking)
            if self._saves.in_background:
                self._replace(callback, "file_exists", self._looking)
        for logger in loggers if self._saves.in_background else ():
            self._replace(logger, "after_save_checkpoint", self._announcing)

    def remove(self) -> None:
        """Give them back."""
        for owner, name in self._replaced:
            del vars(owner)[name]
        self._replaced.clear()

    def _replace(self, owner: Any, name: str, stand_in: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if callable(original) and name not in vars(owner):
            vars(owner)[name] = stand_in(original)
            self._replaced.append((owner, name))

    def _linking(self, original: Any) -> Any:
        def link(trainer: Any, filepath: Any, linkpath: Any) -> None:
            target, place = self._local(filepath), self._local(linkpath)
            assert target is not None, "Lightning links local files only"
            assert place is not None
            if trainer.is_global_zero:
                self._saves.link(target, place)
            trainer.strategy.barrier()

        return link

    def _looking(self, original: Any) -> Any:
        def file_exists(filepath: Any, trainer: Any) -> bool:
            path = self._local(filepath)
            if path is None:
                return bool(original(filepath, trainer))
            is_there = trainer.is_global_zero and self._saves.exists(path)
            return bool(trainer.strategy.reduce_boolean_decision(is_there, all=False))

        return file_exists

    def _announcing(self, original: Any) -> Any:
        def after_save_checkpoint(callback: Any) -> None:
            now = _as_it_is(next((each for each in self._callbacks if each == callback), callback))
            self._saves.announce(lambda: original(now))

        return after_save_checkpoint


def _as_it_is(callback: Any) -> Any:
    """A copy: when it is looked at the callback speaks of the next checkpoint already, which is not there."""
    copied = copy.copy(callback)
    for name, value in vars(copied).items():
        if isinstance(value, dict):
            vars(copied)[name] = dict(value)
    return copied
