"""Background calls: a thread for a call that may take long or never return, or for one that is repeated.

A call of a store or a driver may never return, and nothing can give it up but the thread that waits for it. A
checkpoint is written while training goes on. Ranks, and processes that one has started, are looked at once a second or
more often.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, final

__all__ = ["BackgroundCall", "call_every"]

T = TypeVar("T")


@final
class BackgroundCall(Generic[T]):
    """Call that is started at once in a thread of its own.

    Args:
        call: dropped when it is over.
        is_awaited: whether Python waits for it before it exits; otherwise it may never return.
    """

    def __init__(self, call: Callable[[], T], *, is_awaited: bool = False) -> None:
        self._value: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._make, args=(call,), name="smp call", daemon=not is_awaited)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def within(self, seconds: float | None) -> bool:
        """Wait for at most ``seconds`` (``None``: as long as it takes); whether the call is over."""
        self._thread.join(seconds)
        return self.is_over

    def get(self) -> T:
        """Result of the call, once it is over; raises its error."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # `None` may be what is returned

    def _make(self, call: Callable[[], T]) -> None:
        try:
            self._value = call()
        except Exception as error:
            self._error = error


def call_every(
    seconds: float, look: Callable[[], bool], name: str, stop: threading.Event | None = None
) -> threading.Thread:
    """Start a thread that calls ``look`` every ``seconds``, until it returns ``False`` or ``stop`` is set."""

    def run() -> None:
        until = stop or threading.Event()
        while not until.wait(seconds) and look():
            pass

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
