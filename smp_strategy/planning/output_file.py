"""Files that people or other jobs read, and what they are told when one cannot be written."""

import os
import secrets
from pathlib import Path
from typing import Protocol

from smp_strategy.errors import ConfigError, SMPError, cause_of

__all__ = ["Report", "save_report", "write_atomically"]


class Report(Protocol):
    """Something to be read: as text, by ``str``, as data, and in a browser."""

    def to_json(self) -> str:
        """As data."""

    def to_html(self) -> str:
        """As a page."""


def save_report(path: str | Path, report: Report, what: str, *, is_here: bool = True) -> None:
    """Write ``report`` to a file in the form that the ending asks for: ``.txt``, ``.json`` or ``.html``.

    Args:
        path: the file.
        report: what is to be read.
        what: it is, for messages.
        is_here: whether this rank writes; others learn of a wrong ending, too.

    Raises:
        ConfigError: another ending.
    """
    path = Path(path)
    forms = {".txt": report.__str__, ".json": report.to_json, ".html": report.to_html}
    if path.suffix not in forms:
        raise ConfigError(
            f"{what} is written as {', '.join(forms)}, but the file is to be {path.name!r}. Change its ending."
        )
    if is_here:
        write_atomically(path, forms[path.suffix]() + "\n")


def write_atomically(path: str | Path, text: str) -> None:
    """Write ``text`` so that whoever reads the file finds all of it, or what was there before.

    Raises:
        SMPError: it could not be written; what was there before still is.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name that nobody can foresee, and a file that was not there: else a link in its place would be followed.
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
