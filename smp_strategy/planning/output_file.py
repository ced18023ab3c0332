"""Atomic writes of text files that people or other jobs read: partition files and reports."""

import errno
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from smp_strategy.config.special_paths import special_file
from smp_strategy.errors import ConfigError, SMPError, cause_of

__all__ = ["refuse_unwritable", "write_atomically"]


def refuse_unwritable(path: str | Path, name: str) -> None:
    """Refuse a path that :func:`write_atomically` could not write, before there is anything to write.

    Args:
        path: the file.
        name: name of the option that it comes from.

    Raises:
        ConfigError: it cannot be written.
    """
    path = Path(path)
    if kind := special_file(path):
        raise ConfigError(f"`{name}` ({path}) is {kind}, which a file would replace. Give the path of a file.")
    try:
        with suppress(FileNotFoundError):
            path.lstat()  # a name that the system takes
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise ConfigError(f"`{name}` ({path}) cannot be written: {cause_of(error, path)}") from None


def write_atomically(path: str | Path, text: str) -> None:
    """Write ``text`` atomically: a reader finds either the old content or all of the new one.

    Raises:
        SMPError: the file could not be written; its old content is untouched.
    """
    path = Path(path)
    if kind := special_file(path):
        raise SMPError(f"{path} was not written: it is {kind}, which a file would replace.")
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
