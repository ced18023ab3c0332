"""The command ``smp verify``."""

from argparse import Namespace
from pathlib import Path
from pickle import UnpicklingError
from typing import Final

from smp_strategy.checkpoint.convert.detect_format import located, open_checkpoint
from smp_strategy.checkpoint.storage.full_file_checksums import problems_of_bytes
from smp_strategy.checkpoint.storage.path_kind import CheckpointKind, kind_of, unreadable
from smp_strategy.checkpoint.storage.remote_path import AnyPath, any_path
from smp_strategy.checkpoint.storage.torch_load import load_file
from smp_strategy.checkpoint.storage.verify import advice, has_digests, problems_of
from smp_strategy.config.sizes import show_count
from smp_strategy.errors import CheckpointError, DamagedError, printable

__all__ = ["VERDICTS", "run", "verdict"]

VERDICTS: Final = ("intact", "damaged", "unknown")
"""Names of the verdicts, by exit status."""
_INTACT, _DAMAGED, _UNKNOWN = range(3)
_MOST: Final = 5


def run(given: Namespace) -> int:
    """Run the command; returns its exit status."""
    statuses = set()
    for name in given.checkpoints:
        status, problems = verdict(any_path(name))
        statuses.add(status)
        line = f"{name}: {VERDICTS[status]}{said(any_path(name), status, problems)}"
        print(printable(line, lines=False), flush=True)
    return next((status for status in (_DAMAGED, _UNKNOWN) if status in statuses), _INTACT)


def said(path: AnyPath, status: int, problems: list[str]) -> str:
    """The problems in one line, and what to load instead of a damaged checkpoint."""
    if not problems:
        return ""
    more = [show_count(len(problems) - _MOST, "more problem")] if len(problems) > _MOST else []
    line = "; ".join(problem.rstrip(".") for problem in [*problems[:_MOST], *more])
    return f": {line}. {advice(path)}" if status == _DAMAGED else f": {line}."


def verdict(path: AnyPath) -> tuple[int, list[str]]:
    """Index of :data:`VERDICTS` for a checkpoint, and its problems."""
    try:
        place = located(path)
        kind = kind_of(place)
    except DamagedError as error:
        return _DAMAGED, [str(error)]
    except CheckpointError as error:
        return _UNKNOWN, [str(error)]
    if (reason := unreadable(place, kind)) is not None:
        return _UNKNOWN, [reason]
    torch_file = place if kind is CheckpointKind.TORCH_FILE and isinstance(place, Path) else None
    is_covered = has_digests(place)
    if is_covered and (problems := problems_of_bytes(torch_file) if torch_file else problems_of(place)):
        return _DAMAGED, [str(each) for each in problems]
    if is_covered and not torch_file:
        return _INTACT, []
    try:
        if torch_file:
            load_file(torch_file, weights_only=True)
        else:
            open_checkpoint(place, verify=False)
    except CheckpointError as error:
        is_readable = kind is CheckpointKind.OTHER or isinstance(error.__cause__, UnpicklingError)
        return (_UNKNOWN if is_readable else _DAMAGED), [str(error)]
    if is_covered:
        return _INTACT, []
    return _UNKNOWN, ["readable, but another program wrote it, without digests: damage cannot be ruled out"]
