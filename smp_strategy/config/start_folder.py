"""Working directory in which the script was started.

Other ranks run the script again, which may be named by a relative path and may have changed the directory meanwhile. A
process has no record of its first working directory. So it is saved as soon as torch is imported
(:mod:`smp_strategy._autoload`), which scripts do at their beginning.
"""

import os
from typing import Final

__all__ = ["STARTED_IN"]


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None


STARTED_IN: Final = _folder()
