"""Background waits: threads that wait for messages, and do what follows once they have arrived.

gloo can wait for a message but cannot give up a wait, nor call back when the message comes. So a thread waits, and the
code that needs the message can check other things meanwhile. Messages that are already there need no thread, which
would take a core away from computation.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar, final

from smp_strategy.distributed.deadlock import beside
from smp_strategy.distributed.handle import Handle

__all__ = ["BackgroundWaits", "Relay"]

# Time that threads get to end. They need none, unless they are in a wait that was given up, or for a rank that has
# failed.
FAREWELL_SECONDS = 0.5

T = TypeVar("T")


@final
class Relay:
    """Thread that does one job after the other; it is started with the first job.

    In a collective of two hops a rank sends on the parts that it has received. That cannot be left to the code that
    waits for the result: a pipeline stage may be blocked by another stage, that one by a gather in which a third rank
    has yet to forward something, and that one by the first. So a relay of the group forwards, in the order in which the
    collectives were started. That order is the same on all ranks, hence the oldest collective can always be completed.
    (gloo cannot tell whether a message is there, so polling is no alternative.)
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """Run ``job`` after those that were submitted before."""
        work = Handle(job)
        self.take_over(work)
        return work

    def take_over(self, work: Handle[object], then: Callable[[], None] = lambda: None) -> None:
        """Wait for ``work`` in the thread, and call ``then``."""
        if self._thread is None:
            # A wait that was given up must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="relay", daemon=True)
            self._thread.start()
        self._jobs.put((work.hand_over(), then))

    def end(self) -> None:
        """Let the thread end after its last job, without waiting for that."""
        if self._thread is not None:
            self._jobs.put(None)

    def close(self, seconds: float = FAREWELL_SECONDS) -> None:
        """End the thread, and wait for that at most ``seconds``."""
        self.end()
        if self._thread is not None:
            self._thread.join(seconds)
            self._thread = None

    def _work(self) -> None:
        with beside():  # waits are registered by the code that waits for the job
            while (job := self._jobs.get()) is not None:
                finish, then = job
                finish()
                del job, finish  # and with them the memory, which would live until the next job comes
                then()


@final
class BackgroundWaits:
    """Pool of relays that wait for :class:`Handle`, as many as are under way."""

    def __init__(self) -> None:
        self._relays: list[Relay] = []
        self._idle: list[Relay] = []

    def expect(self, work: Handle[object]) -> None:
        if not self._idle:
            self._idle.append(Relay())
            self._relays.append(self._idle[-1])
        relay = self._idle.pop()
        relay.take_over(work, then=lambda: self._idle.append(relay))

    def close(self) -> None:
        """End the threads, except those in a wait that was given up."""
        # A thread that still runs when the interpreter ends can take the process with it.
        deadline = time.monotonic() + FAREWELL_SECONDS
        for relay in self._relays:
            relay.end()
        for relay in self._relays:
            relay.close(max(deadline - time.monotonic(), 0.0))
        self._relays.clear()
        self._idle.clear()
