"""A checkpoint that is written while training goes on: one at a time, and nothing that goes wrong is missed.

A thread writes. What must not happen before the checkpoint is there, such as deleting the one before, is done by the
same thread afterwards, and not at all if the checkpoint has failed. Its error is raised where the main thread comes by
next: at the next step, the next save, the end. Python waits for the thread before it exits, and tells an error then
that nobody has asked for.

Ranks that write together write in the same order, since each of them waits for its own save before it begins the next
one, and nothing else depends on who is ready first. An error is raised on the rank that has it. Those that wait for
that rank learn of it as of any other rank that fails.
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
    """See the module docstring. All methods are for one thread, usually the main one."""

    def __init__(self) -> None:
        self._work: _BackgroundWork | None = None
        self._errors: list[BaseException] = []
        weakref.finalize(self, _tell, self._errors)

    @property
    def is_busy(self) -> bool:
        """Whether something was started of which nobody knows the end yet: see :meth:`check` and :meth:`wait`."""
        return self._work is not None

    def start(self, write: Callable[[], None], what: str = "The checkpoint") -> None:
        """Wait for what was started before, then call ``write`` in a thread.

        Args:
            write: nobody else may change what it writes.
            what: it is, for messages: a path.

        Raises:
            Exception: what has gone wrong before; then nothing is started.
        """
        self.wait()
        self._work = _BackgroundWork(write, what, self._errors)
        self._work.thread.start()

    def after(self, action: Callable[[], None]) -> None:
        """Call ``action`` once everything that was started is there: in the thread, or at once if it is there already.

        If that fails, or an action before this one, it is not called.
        """
        if self._work is not None and self._work.add(action):
            return
        if not self._errors:
            action()

    def check(self) -> None:
        """Raise what has gone wrong meanwhile, once. Does not wait.

        Raises:
            CheckpointError: the checkpoint was not saved.
            Exception: of an action behind it.
        """
        if self._work is not None and self._work.is_over:
            self.wait()

    def wait(self) -> None:
        """Until everything is done.

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
    """What one thread does: knows nothing of :class:`BackgroundSave`, which may go before."""

    def __init__(self, write: Callable[[], None], what: str, errors: list[BaseException]) -> None:
        self.is_over = False
        self.thread = threading.Thread(target=self._run, args=(write, what), name="smp checkpoint", daemon=False)
        self._errors = errors
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def add(self, action: Callable[[], None]) -> bool:
        """Whether ``action`` will be done, if nothing fails before."""
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
        with self._lock:
            if self._waiting and not self._errors:
                return self._waiting.pop(0)
            self._waiting.clear()
            self.is_over = True
            return None


def _tell(errors: list[BaseException]) -> None:
    for error in errors:
        print(f"smp_strategy: {type(error).__name__}: {error}", file=sys.stderr)
