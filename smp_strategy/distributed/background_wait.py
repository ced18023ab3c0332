"""Background waits: threads that wait for messages.

gloo can wait for a message but cannot give up a wait, nor call back when the message comes. So a thread waits, and the
code that needs the message can check other things meanwhile. Messages that are already there need no thread, which
would take a core away from computation.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

from smp_strategy.distributed.handle import Handle

__all__ = ["BackgroundWaits"]

# Time that threads get to end. They need none, unless they are in a wait that was given up.
FAREWELL_SECONDS = 0.5

_Mailbox = SimpleQueue[Callable[[], None] | None]


@final
class BackgroundWaits:
    """Pool of threads that wait for :class:`Handle`, as many as are under way."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._mailboxes: list[_Mailbox] = []
        self._idle: list[_Mailbox] = []

    def expect(self, work: Handle[object]) -> None:
        """Begin to wait for ``work``."""
        mailbox = self._idle.pop() if self._idle else self._new_thread()
        mailbox.put(work.hand_over())

    def close(self) -> None:
        """End the threads, except those in a wait that was given up."""
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
        # A thread in a wait that was given up must not keep the process from ending.
        thread = threading.Thread(target=self._listen, args=(mailbox,), name="messages", daemon=True)
        thread.start()
        self._mailboxes.append(mailbox)
        self._threads.append(thread)
        return mailbox

    def _listen(self, mailbox: "_Mailbox") -> None:
        while (finish := mailbox.get()) is not None:
            finish()
            del finish  # and with it the message, which would live until the next one comes
            self._idle.append(mailbox)
