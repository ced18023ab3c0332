"""Files that people or other jobs read, and what they are told when one cannot be written."""

import errno
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Final, Protocol

from smp_strategy.errors import ConfigError, SMPError

__all__ = ["Report", "cause_of", "is_of_disk", "save_report", "write_atomically"]

_REASONS: Final = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of the disk is used up",
    errno.EFBIG: "a file would be larger than the system allows",
    errno.EACCES: "this process is not allowed to write there",
    errno.EPERM: "this process is not allowed to write there",
    errno.EROFS: "the disk is read-only",
}
_REMEDIES: Final = {
    errno.ENOSPC: "Make room, or save elsewhere.",
    errno.EDQUOT: "Make room, or save elsewhere.",
    errno.EFBIG: "Raise the limit (`ulimit -f`), or save in smaller files.",
}
_OTHER_REMEDY: Final = "Save elsewhere, or ask whoever runs the machine."
# What libraries make of an error of the system that they have met while they wrote.
_OF_RUST: Final = re.compile(r"\(os error (\d+)\)")
_OF_TORCH: Final = ("PytorchStreamWriter failed", "inline_container")
_NEARLY_NOTHING: Final = 2**20  # bytes


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


def _system_error(error: BaseException) -> int | None:
    """The number of the system's error behind ``error``, which a library may have wrapped; 0: it is not known which.

    ``None``: it is none of the system.
    """
    if isinstance(error, OSError):
        return error.errno or 0
    if found := _OF_RUST.search(str(error)):
        return int(found[1])
    if any(each in str(error) for each in _OF_TORCH):
        # It was met by a file of Python's that PyTorch has written to, or by PyTorch itself, which forgets it.
        return 0 if error.__context__ is None else _system_error(error.__context__) or 0
    return None if error.__cause__ is None else _system_error(error.__cause__)


def is_of_disk(error: BaseException) -> bool:
    """Whether ``error`` is that there is no room, that writing is not allowed, or that it has failed."""
    number = _system_error(error)
    return number in (*_REASONS, errno.EIO) or (number == 0 and not isinstance(error, OSError))


def cause_of(error: BaseException, path: Path | None = None) -> str:
    """Why something could not be written, and what to do, in one or two sentences.

    Args:
        error: of the system, or of a library that writes.
        path: of what is written; ``None``: as the error tells.
    """
    number = _system_error(error)
    if number is None:
        return f"{type(error).__name__}: {error}"
    named = getattr(error, "filename", None)
    if named is not None and not Path(os.fsdecode(named)).name.startswith("."):
        where: Path | None = Path(os.fsdecode(named))
    else:
        where = None if path is None else path.parent
    if number == 0 and path is not None and shutil.disk_usage(_existing(path)).free < _NEARLY_NOTHING:
        number = errno.ENOSPC
    told = os.strerror(number) if number else f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    reason = f"{_REASONS[number]} ({told})" if number in _REASONS else told
    at = f", at {where}" if where is not None else ""
    return f"{reason}{at}. {_REMEDIES.get(number, _OTHER_REMEDY)}"


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if each.exists())
