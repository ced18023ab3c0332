"""Paths that need care: the folder in which the script was started, and special files.

Other ranks run the script again, which may be named by a relative path and may have changed the directory meanwhile. A
process has no record of its first working directory. But Python keeps the full path of the script beside the given
one, and the two tell the directory. Where they do not (``python -m``, ``python ../train.py``), it is the one in which
torch was imported (:mod:`smp_strategy.integrations.autoload`), which scripts do at their beginning.

Devices, FIFOs and sockets: paths that a save must not replace.

A file is saved by renaming a new one over it. For ``/dev/null`` that would put a file in the place of the device, and
break the machine if the user is root. A link to one, as ``/dev/stdout``, would be replaced as well.
"""

import os
import stat
import sys
from pathlib import Path
from typing import Final

__all__ = ["STARTED_IN", "started_in", "special_file"]


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None


STARTED_IN: Final = _folder()


def started_in(script: str | None = None, given: str | None = None) -> str | None:
    """Working directory in which the script was started; ``None``: unknown.

    Args:
        script: Full path of the script; ``None``: that of this process.
        given: The path in the command; ``None``: that of this process.
    """
    script = getattr(sys.modules["__main__"], "__file__", None) if script is None else script
    relative = os.path.normpath(sys.argv[0] if given is None else given)
    whole = os.path.normpath(script or "")
    if os.path.isabs(whole) and not os.path.isabs(relative) and whole.endswith(os.sep + relative):
        return whole.removesuffix(relative).rstrip(os.sep) or os.sep
    return STARTED_IN


_KINDS = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def special_file(path: str | Path) -> str | None:
    """What ``path`` or the target of a link is, in words, if that is neither a file nor a folder; else ``None``."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except (OSError, ValueError):  # nothing is there, or nobody can tell
        return None
    return _KINDS.get(kind)
