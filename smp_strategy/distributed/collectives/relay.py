"""A thread that passes on what has arrived.

In a collective of two hops a rank sends on what it has received. That cannot be left to whoever waits for the result:
a pipeline stage may be blocked by another stage, that one by a gather in which a third rank has yet to pass something
on, and that one by the first. So it is done in the background, by one thread per group, in the order in which the
collectives were started. That order is the same on all ranks, hence the oldest collective can always be carried out to
its end. (gloo can wait for a message but not say whether it is there, so looking in from time to time is no way.)
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar, final

from smp_strategy.distributed.deadlock import beside
from smp_strategy.distributed.work import Work

__all__ = ["Relay"]

# How long the thread gets to end. It takes no time, unless it stands in a wait for a rank that has failed.
FAREWELL_SECONDS = 0.5

T = TypeVar("T")


@final
class Relay:
    """Does one job after the other in a thread, which is started with the first job."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> Work[T]:
        """Have ``job`` done after those that were submitted before."""
        if self._thread is None:
            # A wait that was given up must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="relay", daemon=True)
            self._thread.start()
        work = Work(job)
        self._jobs.put(work.hand_over())
        return work

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(FAREWELL_SECONDS)
            self._thread = None

    def _work(self) -> None:
        with beside():  # who waits for a job says so
            while (finish := self._jobs.get()) is not None:
                finish()
                del finish  # and with them the buffers, which would live until the next job comes
