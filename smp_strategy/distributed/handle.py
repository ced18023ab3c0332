"""Handle of an asynchronous operation (a message, a collective, a copy), in the manner of ``torch``'s.

gloo can wait for a message but can neither say whether it has arrived, nor give up a wait, nor call back. So a handle
is a function that blocks, called once at most: by the first thread that calls :meth:`Handle.wait`, or by a background
thread that the wait is handed over to (:mod:`smp_strategy.distributed.background_wait`).
"""

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar, final

__all__ = ["Handle", "wait_for"]

T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S")


@final
class Handle(Generic[T_co]):
    """Handle of an asynchronous operation. Any number of threads may wait for it.

    Args:
        finish: Blocks until the operation is over and returns its result; keeps alive all memory that the operation
            uses, and is dropped afterwards.
        is_done: Tells without blocking whether ``finish`` would return at once; ``None``: unknown.
    """

    def __init__(self, finish: Callable[[], T_co], is_done: Callable[[], bool] | None = None) -> None:
        self._finish: Callable[[], T_co] | None = finish
        self._probe = is_done
        self._value: T_co | None = None
        self._error: BaseException | None = None
        # Held by the thread that finishes. A bare lock, not a `Future`'s condition: every message passes through one.
        self._lock = threading.Lock()

    def wait(self) -> T_co:
        """Block until the operation is over, and return its result; the same one at each call.

        An error of the operation is raised by every call.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._finish is not None:
                # An error is not kept here: it may be an interrupt of this thread, after which others still can wait.
                self._value = self._finish()
                self._finish = None
            return self._value  # type: ignore[return-value]  # `None` may be the result

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once, as far as that is known."""
        return self._finish is None or (self._probe is not None and self._probe())

    def then(self, follow: Callable[[T_co], S]) -> "Handle[S]":
        """Handle that also does ``follow`` with the result, in the thread that waits for it first."""
        return Handle(lambda: follow(self.wait()), self.is_done)

    def hand_over(self) -> Callable[[], None]:
        """Let another thread finish: from now on :meth:`wait` blocks until it has.

        So :meth:`wait` can be interrupted, unlike a wait inside gloo.

        Returns:
            The function that the other thread has to call, once. It raises nothing.
        """
        self._lock.acquire()  # released by the other thread, so that nobody can finish before it
        return self._finish_in_background

    def _finish_in_background(self) -> None:
        try:
            if self._finish is not None:
                self._value = self._finish()
        except BaseException as error:
            self._error = error
        finally:
            self._finish = None
            self._lock.release()


def wait_for(works: Iterable[Handle[object]]) -> None:
    """Wait for all ``works``, in their order."""
    for work in works:
        work.wait()
