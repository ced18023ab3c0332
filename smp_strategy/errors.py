"""What can go wrong, and who has to act.

Every error names the value, the reason and the remedy. A broken invariant of the package itself is an
``assert``; everything a user can cause or repair is one of the classes below.
"""

from collections.abc import Sequence

__all__ = [
    "ApartError",
    "CheckpointError",
    "ConfigError",
    "DamagedError",
    "PeerFailedError",
    "SMPError",
    "UnsupportedError",
    "changed_in_place",
    "printable",
]


def printable(text: str, *, lines: bool = True) -> str:
    """``text`` for a terminal, on which names in files may not move the cursor, hide or turn what is beside them.

    Args:
        text: with names of files, tensors and the like.
        lines: whether it may have several lines, and tabs; otherwise the ends of lines are escaped, too.

    Returns:
        Characters that cannot be seen as ``\\x1b``, ``\\u202e`` and so on; all others as they are.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )


class SMPError(RuntimeError):
    """Root of all errors that ``smp_strategy`` raises on purpose; what stands in it can be shown on a terminal."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))


class ConfigError(SMPError, ValueError):
    """One or more options are wrong; all mistakes are listed together.

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
    """Ranks are in different places and wait for each other: they do not make the same calls."""


class CheckpointError(SMPError):
    """A checkpoint is damaged, incomplete, of another model, or none at all; the message names file and tensor."""


class DamagedError(CheckpointError):
    """A checkpoint, as far as there is one, is not as it was written: another one has to take its place."""


class PeerFailedError(SMPError):
    """Another rank stopped; its traceback comes first in the message where it is known."""


def changed_in_place(shape: Sequence[int], version: int, expected: int) -> RuntimeError:
    """Autograd's own complaint about a tensor that backward needs and that was written to since."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of shape {list(shape)} is at version {version}; expected version {expected} instead."
    )
