"""Threads for programs that take turns with their scheduler, so that exactly one of the two runs.

A thread and its scheduler wake each other through a pair of sockets, not through a lock or a queue. Linux takes whoever
writes into a Unix socket to be about to sleep (its wake-up is a *synchronous* one) and lets the reader go on in its
place: on the same core, whose caches hold what both work with. A thread that a lock wakes starts on any core, beside
another rank's that has work there, while its scheduler's core idles until the two are sorted out.
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
    """Runs one task after the other, each in turns with the scheduler, and ends when nobody needs it any more.

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
        """Called by the scheduler: let the thread run ``task``, which raises nothing, until it hands back or ends."""
        self._tasks.append(task)
        self.resume()

    def resume(self) -> None:
        """Called by the scheduler: let the task go on until it hands back or ends."""
        self._scheduler.send(b"\0")
        self._scheduler.recv(1)

    def finish(self, has_ended: Callable[[], bool]) -> None:
        """Called by the scheduler: let the task go on until it has ended; it does not hand back any more.

        Ctrl-C may have interrupted the scheduler anywhere in the task's turn. Nobody knows whose turn it is then, and
        the thread is of no use for another task.
        """
        self._scheduler.send(b"\0")
        while not has_ended():
            self._scheduler.recv(1)

    def hand_back(self) -> None:
        """Called by the task: sleep until the scheduler resumes it."""
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
    """As many as there are programs alive at once, used again: each keeps an OpenMP team of its own."""

    def __init__(self) -> None:
        self._idle: list[ProgramThread] = []

    def take(self) -> ProgramThread:
        """One that has nothing to do."""
        return self._idle.pop() if self._idle else ProgramThread()

    def put_back(self, thread: ProgramThread) -> None:
        """Its task has ended."""
        self._idle.append(thread)

    def close(self) -> None:
        """Let go of those that have nothing to do."""
        self._idle.clear()
