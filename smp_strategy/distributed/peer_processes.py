"""Processes of other ranks on this machine: whether they are stopped, and how they have ended.

A killed rank cannot say anything, and only the process that has started it can wait for its exit code. But until that
has been done, the system shows the code to all processes of the same user (``/proc``). So a rank that loses its
connection to another one looks there at once. torchrun asks for exit codes ten times a second.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, final

from smp_strategy.errors import MORE

__all__ = [
    "STARTED",
    "STATE",
    "PeerProcess",
    "exit_code_of",
    "fields_of",
    "has_ended",
    "how_it_ended",
    "is_exiting",
    "is_stopped",
    "process_space",
]

_GUESSES: Final[Mapping[int, str]] = {
    signal.SIGKILL: f", as the system does when memory runs out (see `dmesg`). {MORE}202",
    signal.SIGBUS: ", as the system does when a file is made shorter while it is read, or `/dev/shm` is full. "
    f"{MORE}509",
    signal.SIGABRT: ", as gloo does when the ranks of a group make different calls, such as a layer that only some of "
    f"them compute (see what it printed). {MORE}501",
    signal.SIGUSR1: ", which ends a process that does not handle it: let the scheduler send SIGTERM, which saves",
    signal.SIGUSR2: ", which ends a process that does not handle it: let the scheduler send SIGTERM, which saves",
}
# Fields after the name of the program.
STATE, _FLAGS, STARTED, _WAIT_STATUS = 0, 6, 19, 49
_PF_EXITING: Final = 4
_UNKNOWN: Final = "unknown"


@final
class PeerProcess(NamedTuple):
    """The process of a rank on this machine."""

    rank: int
    """Its rank."""
    pid: int
    """Process id."""
    started: str
    """Start time in clock ticks, because process ids are used again."""

    @staticmethod
    def of(rank: int, pid: int) -> "PeerProcess":
        """The process of ``rank``, which runs."""
        return PeerProcess(rank, pid, _started(fields_of(pid)))

    def encode(self) -> str:
        """One line of text."""
        return f"{self.rank} {self.pid} {self.started}\n"

    @staticmethod
    def decode(line: str) -> "PeerProcess":
        rank, pid, started = line.split()
        return PeerProcess(int(rank), int(pid), started)


def process_space() -> str:
    """Identity of the running kernel and of the namespace of process ids."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return _UNKNOWN


def is_stopped(pid: int) -> bool | None:
    """Whether a process of this machine is stopped; ``None``: it is none, or this system does not say."""
    fields = fields_of(pid)
    return fields[STATE] not in "RSDI" if fields else None


def is_exiting(pid: int) -> bool:
    """Whether a process of this machine has begun to exit; it closes its files, one after the other, after that."""
    fields = fields_of(pid)
    return bool(fields) and int(fields[_FLAGS]) & _PF_EXITING != 0


def has_ended(process: PeerProcess) -> bool:
    fields = fields_of(process.pid)
    return process.started != _UNKNOWN and (_started(fields) != process.started or fields[STATE] in "ZX")


def exit_code_of(process: PeerProcess) -> int | None:
    """Exit code of ``process``, as ``subprocess`` gives it; ``None``: it runs, or nothing tells of its end any more."""
    fields = fields_of(process.pid)
    if len(fields) <= _WAIT_STATUS or fields[STATE] not in "ZX" or _started(fields) != process.started:
        return None
    return os.waitstatus_to_exitcode(int(fields[_WAIT_STATUS]))


def how_it_ended(pid: int, code: int) -> str:
    """A sentence about the end of a process.

    Args:
        pid: Process id.
        code: ``subprocess``'s return code, negative for a signal.
    """
    if code >= 0:
        return f"its process ({pid}) ended with exit code {code}."
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    guess = _GUESSES.get(number, "")
    return f"its process ({pid}) was killed by {name} (signal {number}){guess}."


def fields_of(pid: int) -> Sequence[str]:
    """Fields of the system's line on a process that follow the program's name; empty: it says nothing."""
    try:
        # The name, in parentheses, can have spaces and parentheses in it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ()


def _started(fields: Sequence[str]) -> str:
    return fields[STARTED] if fields else _UNKNOWN
