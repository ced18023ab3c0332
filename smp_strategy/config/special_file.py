"""Devices, FIFOs and sockets: paths that a save must not replace.

A file is saved by renaming a new one over it. For ``/dev/null`` that would put a file in the place of the device, and
break the machine if the user is root. A link to one, as ``/dev/stdout``, would be replaced as well.
"""

import os
import stat
from pathlib import Path

__all__ = ["special_file"]

_KINDS = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def special_file(path: str | Path) -> str | None:
    """What ``path`` or the target of a link is, in words, if that is neither a file nor a folder; else ``None``."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except (OSError, ValueError):  # nothing is there, or nobody can tell
        return None
    return _KINDS.get(kind)
