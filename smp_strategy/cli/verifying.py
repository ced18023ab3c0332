"""``smp verify``."""

from argparse import Namespace
from pathlib import Path
from typing import Final

from smp_strategy.sizes import show_count
from smp_strategy.storage import commit
from smp_strategy.storage.full_digests import has_digests
from smp_strategy.storage.manifest import FILE_NAME as MANIFEST
from smp_strategy.storage.previous import advice
from smp_strategy.storage.stored import is_sharded
from smp_strategy.storage.verify import problems_of

__all__ = ["VERDICTS", "run", "verdict"]

VERDICTS: Final = ("intact", "damaged", "unknown")
"""By exit status."""
_INTACT, _DAMAGED, _UNKNOWN = range(3)
_MOST: Final = 5


def run(given: Namespace) -> int:
    """Carry out the command; returns its exit status."""
    statuses = set()
    for name in given.checkpoints:
        status, problems = verdict(Path(name))
        statuses.add(status)
        print(f"{name}: {VERDICTS[status]}{said(Path(name), status, problems)}", flush=True)
    return next((status for status in (_DAMAGED, _UNKNOWN) if status in statuses), _INTACT)


def said(path: Path, status: int, problems: list[str]) -> str:
    """What is wrong, in one line, and what to load instead of a damaged one."""
    if not problems:
        return ""
    more = [show_count(len(problems) - _MOST, "more problem")] if len(problems) > _MOST else []
    line = "; ".join(problem.rstrip(".") for problem in [*problems[:_MOST], *more])
    return f": {line}. {advice(path)}" if status == _DAMAGED else f": {line}."


def verdict(path: Path) -> tuple[int, list[str]]:
    """Whether a checkpoint is as it was written: an index of :data:`VERDICTS`, and what is wrong."""
    commit.recover(path)
    if is_sharded(path) or (path / MANIFEST).is_file():
        problems = problems_of(path)
        if [each.file for each in problems] == [MANIFEST] and not (path / MANIFEST).exists():
            return _UNKNOWN, ["another program wrote it, without digests"]
    elif path.is_file() and path.suffix != ".safetensors":
        problems = problems_of(path)
        if not problems and not has_digests(path):
            return _UNKNOWN, ["another program wrote it, without digests"]
    else:
        there = "it has no digests: it is no checkpoint of ours" if path.exists() else "there is nothing of this name"
        return _UNKNOWN, [there]
    return (_DAMAGED if problems else _INTACT), [str(each) for each in problems]
