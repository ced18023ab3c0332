"""Atomic writes of text files that people or other jobs read: partition files and reports."""

import os
import secrets
from pathlib import Path

from smp_strategy.errors import SMPError, cause_of

__all__ = ["write_atomically"]


def write_atomically(path: str | Path, text: str) -> None:
    """Write ``text`` atomically: a reader finds either the old content or all of the new one.

    Raises:
        SMPError: the file could not be written; its old content is untouched.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unpredictable name and O_EXCL: otherwise a symbolic link in its place would be followed.
        temporary = path.with_name(f".{secrets.token_hex(8)}.writing")
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with open(number, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(number)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SMPError(
            f"{path} was not written: {cause_of(error, path)} What was there before, if anything, is untouched."
        ) from error
