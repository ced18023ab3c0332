"""Files that people or other jobs read."""

import os
from pathlib import Path
from typing import Protocol

from smp_strategy.errors import ConfigError

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
    """Write ``text`` so that whoever reads the file finds all of it, or what was there before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
