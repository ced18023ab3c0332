"""What is said when a checkpoint cannot be written: its path, why, and what there still is.

Errors of the system tell none of that where a disk is full, and libraries that write files make others of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from smp_strategy.errors import CheckpointError, SMPError, cause_of, is_of_disk

__all__ = ["BEFORE", "saving"]

BEFORE: Final = "checkpoints that were there before are untouched."


@contextmanager
def saving(target: Path) -> Iterator[None]:
    """An error of the disk in here is one of writing ``target``; others are what they are.

    Raises:
        CheckpointError: in their place.
    """
    try:
        yield
    except SMPError:
        raise
    except Exception as error:
        if not is_of_disk(error):
            raise
        raise CheckpointError(f"{target} was not saved: {cause_of(error, target)} {BEFORE.capitalize()}") from error
