"""Child processes: rank 0 watches the ranks that it has started, and they watch rank 0.

A rank that fails usually breaks a connection, and the resulting errors end the others. Only the parent of a process can
know that a signal has killed it, and which. So a thread of rank 0 watches its children and publishes such an end on
their behalf. A thread of each child checks that rank 0 is alive, because a killed process cannot publish anything.
Either thread ends its process if that is still waiting for something else.
"""

import atexit
import gc
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, final

from smp_strategy.distributed.background_call import call_every
from smp_strategy.engine.lifecycle.crash_report import publish_end, stopped_for
from smp_strategy.integrations.autoload import LAUNCHER, RARELY

__all__ = ["GRACE_SECONDS", "STOPPED", "Children", "end_with_launcher"]

GRACE_SECONDS: Final = 5.0
# Python takes seconds to exit, on a busy machine many of them.
_EXIT_SECONDS: Final = 30.0
# Exit code of a process that SIGTERM has ended, by the convention of shells and schedulers.
STOPPED: Final = 128 + signal.SIGTERM
_POLL_SECONDS: Final = 0.25
STOPPED_SECONDS: Final = 60.0
"""Time for which a rank may be stopped before all ranks have met."""


@final
class Children:
    """The ranks that this process has started."""

    def __init__(self, processes: list["subprocess.Popen[bytes]"]) -> None:
        self._processes = processes
        self._expected_to_end = threading.Event()
        self._ranks: list[int] = []
        self._farewell: int | None = None
        self._stopped: dict[int, float] = {}

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str], folder: str | None) -> None:
        """Start the process of ``rank``."""
        if self._farewell is None:
            # The byte is never read, only polled for, so that every child sees it.
            self._farewell, writing = os.pipe()
            atexit.register(self._leave_together)
            atexit.register(os.write, writing, b"\0")
            is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            if is_free and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._end_all)
        variables = {**environment, LAUNCHER: f"{os.getpid()}:{self._farewell}"}
        self._ranks.append(rank)
        self._processes.append(subprocess.Popen(command, env=variables, cwd=folder, pass_fds=[self._farewell]))

    def watch(self) -> None:
        """Watch the children, in a daemon thread."""
        call_every(_POLL_SECONDS, self._look, "smp-child-watcher", self._expected_to_end)

    def lost(self) -> str:
        """A sentence about a rank that has ended well, or is stopped, before all ranks have met; empty: there is none.

        One that has failed is reported by the thread.
        """
        for rank, process in zip(self._ranks, self._processes, strict=True):
            if process.poll() == 0:
                return (
                    f"Rank {rank} has ended with exit code 0, but the others wait for it to begin the run: all ranks "
                    "run the same script, and must call the Trainer alike."
                )
            if (seconds := stopped_for(process.pid, self._stopped)) > STOPPED_SECONDS:
                return (
                    f"Rank {rank} (process {process.pid}) has been stopped (by SIGSTOP or a debugger) for "
                    f"{seconds:.0f} s, and the others wait for it to begin the run. Let it go on or end it, and start "
                    "the run again."
                )
        return ""

    def end(self, patience: float = GRACE_SECONDS) -> None:
        """Wait ``patience`` seconds for all children together, then kill the remaining ones."""
        self._expected_to_end.set()
        deadline = time.monotonic() + patience
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 0))
        for process in self._processes:
            if process.poll() is None:
                # A process that waits inside a collective does not handle SIGTERM.
                process.kill()
                process.wait()

    def _leave_together(self) -> None:
        """At the end of this process: end with an error if a rank does that had one when nobody needed it any more.

        A rank may fail in `teardown`, or in the rest of the script. Nobody learns of it but its parent, whose exit code
        is that of the run.
        """
        if self._expected_to_end.is_set() or threading.current_thread() is not threading.main_thread():
            return
        deadline = time.monotonic() + _EXIT_SECONDS
        for rank, process in zip(self._ranks, self._processes, strict=True):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 0))
            if _has_failed(process):
                logging.shutdown()
                story = publish_end(rank, process.pid, process.returncode, is_over=True)
                _leave(f"rank {rank} failed at the end of the run: {story}", 1)

    def _end_all(self, number: int, frame: object) -> None:
        """Handle SIGTERM until Lightning does: pass it on to the children, then end this process."""
        # Lightning's handler calls this one, too.
        if signal.getsignal(number) != self._end_all:
            return
        for process in self._processes:
            process.send_signal(number)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_POLL_SECONDS)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _look(self) -> bool:
        """End this process if a child has failed; whether some still run."""
        failed = [each for each in zip(self._ranks, self._processes, strict=True) if _has_failed(each[1])]
        if not failed:
            return any(process.returncode is None for process in self._processes)
        rank, process = failed[0]
        story = publish_end(rank, process.pid, process.returncode)
        if not self._expected_to_end.wait(GRACE_SECONDS):
            self.end(patience=0)
            code = process.returncode if process.returncode > 0 else 128 - process.returncode
            _leave(f"rank {rank} failed first: {story} This process still waited for it; all ranks are ended.", code)
        return False


def _has_failed(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() not in (None, 0, STOPPED)


def end_with_launcher() -> None:
    """End this process soon after its launcher has been killed, if Lightning's launcher has started it.

    Garbage is collected as usual from here on; see :func:`~smp_strategy.integrations.autoload.collect_rarely`.
    """
    # Removed, so that processes started by this one do not inherit it.
    given = os.environ.pop(LAUNCHER, None)
    if given is not None:
        pid, farewell, *threshold = map(int, given.split(":"))
        if threshold and gc.get_threshold()[0] == RARELY:  # the script has set no other
            gc.set_threshold(*threshold)
            gc.freeze()
            gc.unfreeze()  # All objects of now are of the oldest generation: no collection looks at them soon.
        call_every(_POLL_SECONDS, partial(_look_at_launcher, pid, farewell), "smp-parent-watcher")


def _look_at_launcher(pid: int, farewell: int) -> bool:
    """End this process if its launcher ``pid`` is gone without a farewell; whether it is still there."""
    if os.getppid() == pid:
        return True
    poll = select.poll()
    poll.register(farewell, select.POLLIN)
    if not any(event & select.POLLIN for _, event in poll.poll(0)):
        time.sleep(GRACE_SECONDS)
        rank = os.environ.get("LOCAL_RANK")
        _leave(f"[rank{rank}]: process {pid}, which has started this one, is gone; this one ends.", 1)
    return False


def _leave(words: str, code: int) -> None:
    """End this process at once, even if other threads are blocked."""
    sys.stdout.flush()
    sys.stderr.write(words + "\n")
    sys.stderr.flush()
    os._exit(code)
