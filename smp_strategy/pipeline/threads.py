"""Thread pool for programs that take turns with their scheduler, so that exactly one of the two runs.

A thread and its scheduler wake each other through a pair of sockets, not through a lock or a queue. Linux expects the
writer of a Unix socket to sleep soon (the wake-up is *synchronous*), and runs the reader on the same core, whose caches
hold the data of both. A thread that a lock wakes starts on any core, beside another rank's thread that has work there,
while its scheduler's core idles until the load is balanced.
"""

import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import final

from smp_strategy.errors import UnsupportedError

__all__ = ["ProgramThread", "ThreadPool"]

Task = Callable[[], None]


@final
class ProgramThread:
    """Thread that runs one task after the other, each in turns with the scheduler, and ends when it is collected.

    Raises:
        UnsupportedError: the process may open no more files.
    """

    def __init__(self) -> None:
        try:
            self._scheduler, self._program = socket.socketpair()
        except OSError as error:
            raise UnsupportedError(
                f"No sockets for one more microbatch that waits for its turn: {error.strerror}. Each takes two of the "
                "files that a process may open. Allow more (`ulimit -n`), or use fewer microbatches."
            ) from error
        self._tasks: list[Task] = []
        weakref.finalize(self, self._scheduler.close)
        # A program that is never resumed must not keep the process from ending.
        threading.Thread(target=_work, args=(self._program, self._tasks), name="microbatch", daemon=True).start()

    def begin(self, task: Task) -> None:
        """Run ``task``, which raises nothing, until it hands back or ends; called by the scheduler."""
        self._tasks.append(task)
        self.resume()

    def resume(self) -> None:
        """Resume the task until it hands back or ends; called by the scheduler."""
        self._scheduler.send(b"\0")
        self._scheduler.recv(1)

    def finish(self, has_ended: Callable[[], bool]) -> None:
        """Resume the task until it has ended, without handing back; called by the scheduler.

        Ctrl-C may have interrupted the scheduler anywhere in the task's turn. It is unknown then whose turn it is, and
        the thread cannot be used for another task.
        """
        self._scheduler.send(b"\0")
        while not has_ended():
            self._scheduler.recv(1)

    def hand_back(self) -> None:
        """Sleep until the scheduler resumes the task; called by the task."""
        self._program.send(b"\0")
        self._program.recv(1)


def _work(program: socket.socket, tasks: list[Task]) -> None:
    # An interrupted scheduler may be gone when the task ends.
    with program, suppress(ConnectionError):
        while program.recv(1):  # which is empty once the other end is closed
            if tasks:  # else: see `finish`
                tasks.pop()()
            program.send(b"\0")


@final
class ThreadPool:
    """Pool of threads, one per living program. They are reused, since each keeps an OpenMP team of its own."""

    def __init__(self) -> None:
        self._idle: list[ProgramThread] = []

    def take(self) -> ProgramThread:
        """An idle thread, or a new one."""
        return self._idle.pop() if self._idle else ProgramThread()

    def put_back(self, thread: ProgramThread) -> None:
        """Return a thread whose task has ended."""
        self._idle.append(thread)

    def close(self) -> None:
        """Release the idle threads, which end."""
        self._idle.clear()
