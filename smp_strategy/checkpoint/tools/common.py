"""Shared parts of the commands: checks of the output path, progress bar, messages."""

import filecmp
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from smp_strategy.checkpoint.convert.contents import CheckpointContents
from smp_strategy.checkpoint.convert.write_hugging_face import is_copied
from smp_strategy.checkpoint.storage.atomic_commit import Check
from smp_strategy.checkpoint.storage.path_kind import foreign_entries, reason_to_keep
from smp_strategy.errors import CheckpointError, printable

__all__ = ["check_output", "num_entries", "show_progress", "tell"]


def check_output(given: Namespace) -> tuple[Path, Check]:
    """Path of the output, and the check to repeat just before it is replaced, maybe hours later.

    Raises:
        CheckpointError: an existing path must not be replaced, or is part of the input.
    """
    source, target, hugging_face = Path(given.checkpoint), Path(given.out), getattr(given, "hf", None)

    def check(place: Path) -> None:
        if os.path.lexists(place):
            _check_there(place, source, hugging_face, overwrite=given.overwrite)

    check(target)
    return target, check


def _check_there(target: Path, source: Path, hugging_face: str | None, *, overwrite: bool) -> None:
    if not overwrite:
        raise CheckpointError(f"{target} is there already. Give another name, or --overwrite.")
    real, read = target.resolve(), source.resolve()
    if real == read or real in read.parents or _is_part(real, read):
        raise CheckpointError(f"{target} has what is to be read, so it is not overwritten. Give another name.")
    reason = reason_to_keep(target, is_kept=lambda name: _comes_again(target / name, hugging_face))
    if reason is not None:
        raise CheckpointError(f"{target} is not overwritten: {reason}. Give another name.")


def _is_part(target: Path, source: Path) -> bool:
    """Whether ``target`` is one of the files of the checkpoint that is read."""
    if source not in target.parents:
        return False
    first = target.relative_to(source).parts[0]
    return all(each.partition("/")[0] != first for each in foreign_entries(source))


def _comes_again(file: Path, hugging_face: str | None) -> bool:
    """Whether ``file`` is equal in the folder from which all files but weights are copied."""
    if hugging_face is None or not is_copied(file.name):
        return False
    again = Path(hugging_face, file.name)
    return file.is_file() and again.is_file() and filecmp.cmp(file, again, shallow=False)


def num_entries(contents: CheckpointContents) -> int:
    """Number of weights and optimizer entries to write."""
    return len(contents.weights) + sum(len(optimizer.state) for optimizer in contents.optimizers)


@contextmanager
def show_progress(total: int, *, is_quiet: bool) -> Iterator[Callable[[str], None]]:
    """Progress bar on a terminal; call the yielded function with the name of each of the ``total`` entries."""
    if is_quiet or not sys.stderr.isatty():
        yield lambda name: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=printable(name, lines=False))


def tell(lines: Sequence[str]) -> None:
    """Print messages to stderr, beside the output that was asked for."""
    for line in lines:
        print(printable(line, lines=False), file=sys.stderr)
