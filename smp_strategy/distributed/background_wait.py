"""Waiting for messages in the background.

gloo can wait for a message but cannot give up a wait, nor do anything when the message comes. So a thread waits, and
whoever needs the message can give up after a while and look around. What is there already needs no thread, which would
take a core away from those who compute.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, final

__all__ = ["Arrival", "BackgroundWaits"]

# How long a thread gets to end. It takes no time, unless it stands in a wait that was given up.
FAREWELL_SECONDS = 0.5

T = TypeVar("T")


@final
class Arrival(Generic[T]):
    """Something that is waited for in the background.

    Args:
        wait: blocks until it is there, and returns it.
        listeners: who waits.
    """

    def __init__(self, wait: Callable[[], T], listeners: "BackgroundWaits") -> None:
        self._listeners = listeners
        self._wait: Callable[[], T] | None = wait
        self._value: T | None = None
        self._error: BaseException | None = None
        # Held until it is there. A bare lock, because every message passes through one.
        self._pending = threading.Lock()
        self._pending.acquire()

    @property
    def is_over(self) -> bool:
        """Whether it is there, or will never be."""
        return not self._pending.locked()

    def within(self, seconds: float) -> bool:
        """Wait for it no longer than that; whether it is over."""
        began = time.perf_counter()
        is_over = self._pending.acquire(timeout=seconds)
        if is_over:
            self._pending.release()
        self._listeners.seconds_waited += time.perf_counter() - began
        return is_over

    def get(self) -> T:
        """Block until it is there, and return it."""
        self.within(threading.TIMEOUT_MAX)
        return self.value

    @property
    def value(self) -> T:
        """What has come; raises the error that the wait has ended with, if any."""
        assert self.is_over
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # `None` may be what is waited for

    def listen(self) -> None:
        """Called in the background: wait."""
        assert self._wait is not None
        try:
            self._value = self._wait()
        except BaseException as error:
            self._error = error
        finally:
            self._wait = None  # it holds the message, which whoever asked for it holds too, as long as it is needed
            self._pending.release()


_Mailbox = SimpleQueue[Arrival[Any] | None]


@final
class BackgroundWaits:
    """Threads that wait, as many as there are arrivals under way.

    Attributes:
        seconds_waited: how long arrivals were waited for by those who needed them.
    """

    def __init__(self) -> None:
        self.seconds_waited = 0.0
        self._threads: list[threading.Thread] = []
        self._mailboxes: list[_Mailbox] = []
        self._idle: list[_Mailbox] = []

    def expect(self, wait: Callable[[], T]) -> Arrival[T]:
        """Begin to wait."""
        arrival = Arrival(wait, self)
        mailbox = self._idle.pop() if self._idle else self._new_thread()
        mailbox.put(arrival)
        return arrival

    def close(self) -> None:
        """End the threads, but those that stand in a wait that was given up."""
        for mailbox in self._mailboxes:
            mailbox.put(None)
        # A thread that still runs when the interpreter ends can take the process with it.
        deadline = time.monotonic() + FAREWELL_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._threads.clear()
        self._mailboxes.clear()
        self._idle.clear()

    def _new_thread(self) -> "_Mailbox":
        mailbox: _Mailbox = SimpleQueue()
        # Where a wait has been given up, the thread still stands in it, and must not keep the process from ending.
        thread = threading.Thread(target=self._listen, args=(mailbox,), name="messages", daemon=True)
        thread.start()
        self._mailboxes.append(mailbox)
        self._threads.append(thread)
        return mailbox

    def _listen(self, mailbox: "_Mailbox") -> None:
        while (arrival := mailbox.get()) is not None:
            arrival.listen()
            del arrival  # and with it the message, which would live until the next one comes
            self._idle.append(mailbox)
