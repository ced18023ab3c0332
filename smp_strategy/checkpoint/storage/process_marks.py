"""Names for what a process writes, which tell later whether that process still lives.

A mark has the machine, the process id and the start time of the process. The processes of another machine cannot be
checked: there, the time of the last write decides.
"""

import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Final

from smp_strategy.distributed.peer_processes import STARTED, STATE, fields_of, process_space

__all__ = ["MARK", "is_known_alive", "mark"]

MARK: Final = r"([0-9a-f]{8})-(\d+)-(\d+)"
"""Pattern of a mark; its groups are for :func:`is_known_alive`."""


def mark() -> str:
    pid = os.getpid()
    return f"{_machine()}-{pid}-{_started(pid)}"


def is_known_alive(match: re.Match[str]) -> bool | None:
    """Whether the process of a mark lives; ``None``: it is of another machine."""
    return _started(int(match[2])) == match[3] if match[1] == _machine() else None


def _machine() -> str:
    """Identifier of the space of process ids: machine, boot, and container."""
    return hashlib.sha1(f"{platform.node()}/{process_space()}".encode()).hexdigest()[:8]


def _started(pid: int) -> str:
    """Start time of a process, in clock ticks; empty if there is no such process, or it has ended."""
    fields = fields_of(pid)
    if not fields:
        return "" if Path("/proc/self/stat").exists() else _is_there(pid)
    return "" if fields[STATE] in "ZX" else fields[STARTED]


def _is_there(pid: int) -> str:
    """Substitute for :func:`_started` on systems without ``/proc``; it does not notice that a process id was reused."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "0"
