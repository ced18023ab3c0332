"""Files that people or other jobs read."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from smp_strategy.errors import ConfigError

__all__ = ["form_of", "write_atomically"]


def form_of(path: str | Path, forms: Mapping[str, Callable[[], str]], what: str) -> Callable[[], str]:
    """The one of ``forms`` that the ending of a file asks for.

    Args:
        path: the file.
        forms: who makes its text, by ending.
        what: it will be, for messages.

    Raises:
        ConfigError: another ending.
    """
    path = Path(path)
    if path.suffix not in forms:
        raise ConfigError(
            f"{what} is written as {', '.join(forms)}, but the file is to be {path.name!r}. Change its ending."
        )
    return forms[path.suffix]


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
