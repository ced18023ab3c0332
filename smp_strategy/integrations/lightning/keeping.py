"""What callbacks that keep checkpoints, and loggers that are told of them, do with files that are not there yet.

:class:`Saves` lets it wait. On the way a link gets its new target at once: Lightning removes the old link first, and a
run that is killed in between has no last checkpoint.
"""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

from smp_strategy.integrations.lightning.async_saves import Saves

__all__ = ["KeptCheckpoints"]


@final
class KeptCheckpoints:
    """Stands in for methods of the callbacks and loggers of one run, on the instances.

    Args:
        saves: writes what they keep.
        local: the path of a file that the operating system knows, else ``None``.
    """

    def __init__(self, saves: Saves, local: Callable[[Any], Path | None]) -> None:
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
