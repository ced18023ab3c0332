"""Coroutine of one microbatch's program: it runs until it has to wait, and is resumed at that point.

The program is the user's own code, so it cannot ``yield``. It runs in a thread of its own, and control is handed over:
either the scheduler runs or exactly one program. Threads rather than greenlets, because grad mode, autocast, inference
mode and saved-tensor hooks are thread-local in PyTorch and must not leak from one microbatch into another. The current
device, its stream, grad mode, inference mode and autocast are copied from the scheduler's thread when a program begins.
"""

import contextvars
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

from smp_strategy.distributed.torch_modes import ThreadModes
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.rng import Streams, derive_seed

__all__ = ["BETWEEN_TURNS", "Coroutine", "ProgramThread", "ThreadPool"]

# No other stream derives from the seed of a step or a microbatch by this number.
BETWEEN_TURNS = -1


# [Note: waking a thread]
# A thread and its scheduler wake each other through a pair of sockets, not through a lock or a queue. Linux expects the
# writer of a Unix socket to sleep soon (the wake-up is *synchronous*), and runs the reader on the same core, whose
# caches hold the data of both. A thread that a lock wakes starts on any core, beside another rank's thread that has
# work there, while its scheduler's core idles until the load is balanced.

Task = Callable[[], None]


@final
class ProgramThread:
    """Thread that runs one task after the other, each in turns with the scheduler, and ends when it is collected.

    See [Note: waking a thread].

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


class _CancelledError(BaseException):
    """Ends a paused program that will not be resumed; a ``BaseException``, so that user code does not swallow it."""


@final
class Coroutine:
    """Runs ``body`` in turns.

    Args:
        seed: seed of the program's random streams. At each pause the global generators move to another stream derived
            from it, so that no other code draws the program's next numbers. The caller protects the global generators
            from that (:meth:`smp_strategy.model.rng.Streams.seeded`).
    """

    def __init__(self, body: Callable[[], Any], threads: ThreadPool, *, seed: int, streams: Streams) -> None:
        self.finished = False
        self.result: Any = None
        self._body = body
        self._threads = threads
        self._streams = streams
        self._error: BaseException | None = None
        self._cancelled = False
        # Taken at the first turn, given back at the end.
        self._thread: ProgramThread | None = None
        self._seed = seed
        self._num_turns = 0
        self._stream = streams.stream(seed)

    def resume(self) -> bool:
        """Run until the program pauses or ends; returns whether it has ended, and raises its exception."""
        self._stream.enter()
        try:
            self._turn()
        finally:
            self._num_turns += 1
            self._stream.leave(for_good=self.finished)
            if not self.finished:
                self._streams.begin_states_at(derive_seed(self._seed, BETWEEN_TURNS, self._num_turns))
        if self._error is not None:
            raise self._error
        return self.finished

    def pause(self) -> None:
        """Return control to the scheduler; call it from inside the program."""
        assert self._thread is not None
        if not self._cancelled:
            self._thread.hand_back()
        if self._cancelled:
            raise _CancelledError

    def cancel(self) -> None:
        """End a program at the point where it waits, or at its next pause if Ctrl-C has interrupted its turn."""
        if self._thread is not None:
            self._cancelled = True
            self._thread.finish(lambda: self.finished)
            self._thread = None

    def _turn(self) -> None:
        """Run the program until it pauses or ends."""
        if self._thread is not None:
            self._thread.resume()
        else:
            self._thread = self._threads.take()
            context, modes = contextvars.copy_context(), ThreadModes(self._streams.device)
            self._thread.begin(lambda: context.run(self._run, modes))
        if self.finished:
            self._threads.put_back(self._thread)
            self._thread = None

    def _run(self, modes: ThreadModes) -> None:
        try:
            if not self._cancelled:
                with modes.apply():
                    self.result = self._body()
        except _CancelledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.finished = True
