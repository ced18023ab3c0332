"""The folder in which the script was started.

Other ranks run the script again, which may have been given by a relative path and may have gone to another folder
meanwhile. Nothing of a process tells where it began. So that is noted as soon as torch is imported
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
