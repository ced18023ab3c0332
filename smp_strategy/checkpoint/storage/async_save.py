"""Asynchronous save: a thread writes one checkpoint at a time, and every error is raised in the main thread.

Actions that must not happen before the checkpoint is complete, such as deleting the previous one, run in the same
thread afterwards, and not at all if the checkpoint has failed. An error is raised at the main thread's next call: at
the next step, the next save, the end. Python waits for the thread before it exits, and an error that nobody has asked
for is printed then.

[Note: order of background saves] Ranks that write together write in the same order, since each of them waits for its
own save before it begins the next one, and nothing else depends on which rank is ready first. An error is raised on the
rank that has it. Ranks that wait for that rank learn of it as of any other rank that fails.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import final

from smp_strategy.distributed.deadlock import beside
from smp_strategy.errors import CheckpointError, cause_of

__all__ = ["BackgroundSave"]


@final
class BackgroundSave:
    """Queue of one save and the actions behind it. All methods are for a single thread, usually the main one."""

    def __init__(self) -> None:
        self._work: _BackgroundWork | None = None
        self._errors: list[BaseException] = []
        weakref.finalize(self, _tell, self._errors)

    @property
    def is_busy(self) -> bool:
        """Whether a save was started whose outcome :meth:`check` or :meth:`wait` has not reported yet."""
        return self._work is not None

    def start(self, write: Callable[[], None], what: str = "The checkpoint") -> None:
        """Wait for the previous save, then call ``write`` in a thread.

        Args:
            write: Writes the checkpoint; nothing else may change the values that it writes.
            what: Name of the checkpoint for messages: a path.

        Raises:
            Exception: the error of the previous save; then nothing is started.
        """
        self.wait()
        self._work = _BackgroundWork(write, what, self._errors)
        self._work.thread.start()

    def after(self, action: Callable[[], None]) -> None:
        """Call ``action`` once the save and earlier actions are done: in the thread, or at once if they are done
        already.

        It is not called if the save, or an action before this one, fails.
        """
        if self._work is not None and self._work.add(action):
            return
        if not self._errors:
            action()

    def check(self) -> None:
        """Raise the error of the save, if there is one, once. Does not wait.

        Raises:
            CheckpointError: the checkpoint was not saved.
            Exception: of an action behind it.
        """
        if self._work is not None and self._work.is_over:
            self.wait()

    def wait(self) -> None:
        """Wait until the save and all actions are done.

        Raises:
            CheckpointError: the checkpoint was not saved.
            Exception: of an action behind it.
        """
        if self._work is None:
            return
        self._work.thread.join()
        self._work = None
        if self._errors:
            raise self._errors.pop()


@final
class _BackgroundWork:
    """Thread of one save. Has no reference to its :class:`BackgroundSave`, which may be collected first."""

    def __init__(self, write: Callable[[], None], what: str, errors: list[BaseException]) -> None:
        self.is_over = False
        self.thread = threading.Thread(target=self._run, args=(write, what), name="smp checkpoint", daemon=False)
        self._errors = errors
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def add(self, action: Callable[[], None]) -> bool:
        """Queue ``action``; returns whether it will run, if nothing fails before."""
        with self._lock:
            if not self.is_over:
                self._waiting.append(action)
            return not self.is_over

    def _run(self, write: Callable[[], None], what: str) -> None:
        try:
            with beside():
                write()
        except BaseException as error:
            told = str(error) if isinstance(error, CheckpointError) else cause_of(error)
            failure = CheckpointError(told if told.startswith(what) else f"{what} was not saved: {told}")
            failure.__cause__ = error
            self._errors.append(failure)
        while (action := self._next()) is not None:
            try:
                action()
            except BaseException as error:
                self._errors.append(error)

    def _next(self) -> Callable[[], None] | None:
        # One lock for the last action and `is_over`: an action added in between would never run.
        with self._lock:
            if self._waiting and not self._errors:
                return self._waiting.pop(0)
            self._waiting.clear()
            self.is_over = True
            return None


def _tell(errors: list[BaseException]) -> None:
    for error in errors:
        print(f"smp_strategy: {type(error).__name__}: {error}", file=sys.stderr)
