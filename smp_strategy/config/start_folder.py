"""Working directory in which the script was started.

Other ranks run the script again, which may be named by a relative path and may have changed the directory meanwhile. A
process has no record of its first working directory. But Python keeps the full path of the script beside the given
one, and the two tell the directory. Where they do not (``python -m``, ``python ../train.py``), it is the one in which
torch was imported (:mod:`smp_strategy.integrations.autoload`), which scripts do at their beginning.
"""

import os
import sys
from typing import Final

__all__ = ["STARTED_IN", "started_in"]


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
