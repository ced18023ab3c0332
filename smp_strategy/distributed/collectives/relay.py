"""Relay: a background thread that forwards messages once they have arrived.

In a collective of two hops a rank sends on the parts that it has received. That cannot be left to the code that waits
for the result: a pipeline stage may be blocked by another stage, that one by a gather in which a third rank has yet to
forward something, and that one by the first. So it is done in the background, by one thread per group, in the order in
which the collectives were started. That order is the same on all ranks, hence the oldest collective can always be
completed. (gloo can wait for a message but not tell whether it is there, so polling is no alternative.)
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar, final

from smp_strategy.distributed.deadlock import beside
from smp_strategy.distributed.handle import Handle

__all__ = ["Relay"]

# Time that the thread gets to end. It needs none, unless it is in a wait for a rank that has failed.
FAREWELL_SECONDS = 0.5

T = TypeVar("T")


@final
class Relay:
    """Thread that does one job after the other; it is started with the first job."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> Handle[T]:
        """Run ``job`` after those that were submitted before."""
        if self._thread is None:
            # A wait for a rank that has failed must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="relay", daemon=True)
            self._thread.start()
        work = Handle(job)
        self._jobs.put(work.hand_over())
        return work

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(FAREWELL_SECONDS)
            self._thread = None

    def _work(self) -> None:
        with beside():  # waits are registered by the code that waits for the job
            while (finish := self._jobs.get()) is not None:
                finish()
                del finish  # and with them the buffers, which would live until the next job comes
