"""Callbacks and loggers of a run respect saves in flight (:class:`~smp_strategy.engine.async_saves.AsyncSaves`).

Links are replaced atomically: Lightning removes the old link first, and a run that is killed in between has no last
checkpoint.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, final

from smp_strategy.engine.async_saves import AsyncSaves
from smp_strategy.model.patching import Patches

__all__ = ["KeptCheckpoints"]


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
            if trainer.is_global_zero:
                self._saves.link(filepath, linkpath)
            trainer.strategy.barrier()

        return link

    def _looking(self, original: Any) -> Any:
        def file_exists(filepath: Any, trainer: Any) -> bool:
            is_there = trainer.is_global_zero and self._saves.exists(filepath)
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
