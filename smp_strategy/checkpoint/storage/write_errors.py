"""Error messages of failed saves: the path, the reason, and that older checkpoints are untouched.

Errors of the system tell none of that where a disk is full, and libraries that write files turn them into others.
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
    """Context in which an error of the disk becomes an error of saving ``target``; others stay as they are.

    Raises:
        CheckpointError: in place of an error of the disk.
    """
    try:
        yield
    except SMPError:
        raise
    except Exception as error:
        if not is_of_disk(error):
            raise
        raise CheckpointError(f"{target} was not saved: {cause_of(error, target)} {BEFORE.capitalize()}") from error
