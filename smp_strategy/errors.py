"""Exception classes, and the text of errors about disks.

Every error names the value, the reason and the remedy. A broken invariant of the package itself is an ``assert``;
everything that a user can cause or repair is one of the classes below.
"""

import errno
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

__all__ = [
    "FAILURES",
    "MORE",
    "ApartError",
    "CheckpointError",
    "ConfigError",
    "DamagedError",
    "DoorWords",
    "PeerFailedError",
    "SMPError",
    "UnsupportedError",
    "cause_of",
    "changed_in_place",
    "is_of_disk",
    "printable",
]

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
# Texts of system errors in the errors of libraries that write files.
_OF_RUST: Final = re.compile(r"\(os error (\d+)\)")
_OF_TORCH: Final = ("PytorchStreamWriter failed", "inline_container")
_NEARLY_NOTHING: Final = 2**20  # bytes
MORE: Final = "More: docs/failures.md, "
"""Begins the last line of an error that has a number on the page of failures."""
FAILURES: Final = {
    "must not be larger than the number of units": 101,
    "` is not an option": 102,
    "_parallel_degree` must divide the number of": 104,
    "were given different settings": 105,
    "is on the meta device and has no values": 107,
    "No partition fits": 203,
    "Return the loss from the step; in manual optimization": 301,
    "A placed tensor has memory on one stage only": 302,
    "by a way that cannot be routed between stages": 302,
    "return it from the unit's forward": 303,
    " cannot update pieces of ": 304,
    " cannot update parts of ": 304,
    " without the others: ": 304,
    "wait for each other for ever": 501,
    "did not run the same code in this step": 501,
    "Ranks are in different calls": 502,
    "has given no sign of life": 503,
    "with different inputs": 505,
    "differs between the ranks of one replica": 505,
    " was not saved": 601,
    " is damaged": 602,
    "has changed since it was written": 602,
    "Load it with `weights_only=False`": 603,
    'to have the whole model after a run, set `restore_module="all"`': 605,
}
"""Numbers of errors on the page of failures, by words of their messages."""


def printable(text: str, *, lines: bool = True) -> str:
    """Escape invisible characters of ``text``, so that names in files cannot control the terminal or hide text.

    Args:
        text: contains names of files, tensors and the like.
        lines: whether line ends and tabs are allowed; otherwise they are escaped, too.

    Returns:
        The text with invisible characters as ``\\x1b``, ``\\u202e`` and so on.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )


class SMPError(RuntimeError):
    """Root of all errors that ``smp_strategy`` raises on purpose; the message is safe to show on a terminal.

    Its last line, a note, has the numbers under which the page of failures tells more.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))
        told = str(self)
        # What another rank has failed with is numbered there.
        if " failed first" not in told and (
            numbers := sorted({number for words, number in FAILURES.items() if words in told})
        ):
            self.add_note(MORE + ", ".join(map(str, numbers)))


class ConfigError(SMPError, ValueError):
    """One or more options are wrong; all of them are listed together.

    Args:
        problems: one sentence (or two: reason and remedy) per mistake.
    """

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(self.problems, 1))
            message = f"{len(self.problems)} options are wrong:\n{listed}"
        super().__init__(message)


class UnsupportedError(SMPError):
    """The model or the step does something that cannot be placed on pipeline ranks."""


class ApartError(UnsupportedError):
    """Deadlock of ranks: they wait for each other because they do not make the same calls."""


class CheckpointError(SMPError):
    """A checkpoint is damaged, incomplete, of another model, or missing; the message names file and tensor."""


class DamagedError(CheckpointError):
    """A checkpoint is missing or not as it was written: another one has to be loaded."""


class PeerFailedError(SMPError):
    """Another rank has failed; its traceback comes first in the message if it is known."""


def changed_in_place(shape: Sequence[int], version: int, expected: int) -> RuntimeError:
    """Autograd's error about a tensor that backward needs and that was modified in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of shape {list(shape)} is at version {version}; expected version {expected} instead."
    )


def _system_error(error: BaseException) -> int | None:
    """Error number of the system behind ``error``, which a library may have wrapped; 0: the number is unknown.

    ``None``: it is no error of the system.
    """
    if isinstance(error, OSError):
        return error.errno or 0
    if found := _OF_RUST.search(str(error)):
        return int(found[1])
    if any(each in str(error) for each in _OF_TORCH):
        # A Python file object that PyTorch wrote to has raised it (context), or PyTorch itself, which drops the number.
        return 0 if error.__context__ is None else _system_error(error.__context__) or 0
    return None if error.__cause__ is None else _system_error(error.__cause__)


def is_of_disk(error: BaseException) -> bool:
    """Whether ``error`` means that there is no room, that writing is not allowed, or that it has failed."""
    number = _system_error(error)
    return number in (*_REASONS, errno.EIO) or (number == 0 and not isinstance(error, OSError))


def cause_of(error: BaseException, path: Path | None = None) -> str:
    """Describe why a file could not be written, and the remedy, in one or two sentences.

    Args:
        error: error of the system, or of a library that writes.
        path: path of the file; ``None``: as the error says.
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


@final
@dataclass(frozen=True, kw_only=True)
class DoorWords:
    """Calls of the door that the user came through, as parts of sentences; by default those of either door."""

    in_hook: str = "in a hook of Lightning or in `accelerator.smp.with_weights(lambda: ...)` on all ranks"
    """Where code sees all weights and gradients."""
    first_pass: str = "before training"
    """Where the model is whole and can be called before training."""
    save_model: str = "`trainer.save_checkpoint`, `model.save_pretrained` or `accelerator.get_state_dict(model)`"
    """Call that saves all weights."""
    save_all: str = "`trainer.save_checkpoint` or `accelerator.save_state`"
    """Call that saves weights and optimizers."""
    whole_state: str = ", or `state_dict()` of the optimizer that `accelerator.prepare` has returned"
    """Further way to the whole state of an optimizer, with a comma before it; may be empty."""
    on_one: str = "if trainer.is_global_zero: "
    """Condition that is true on one rank only."""
    on_one_saves: str = (
        "`if trainer.is_global_zero: trainer.save_checkpoint(...)` or "
        "`if accelerator.is_main_process: accelerator.save_state()`"
    )
    """Mistake of saving on one rank."""
    tell: str = "`self.log` or `self.print`, or `accelerator.log` or `accelerator.print`"
    """Calls that log or print on one rank."""
    clip: str = "`gradient_clip_val`, or `accelerator.clip_grad_norm_`"
    """Ways to clip gradients by their norm."""
    average: str = '`self.log(..., sync_dist=True)`, or `accelerator.reduce(value, "mean")`'
    """Ways to average a value over all ranks."""
    end_of_run: str = "`trainer.fit` or `accelerator.end_training()`"
    """Call that ends a run."""
