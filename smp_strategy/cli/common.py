"""What the commands share: opening, refusing to overwrite, progress, and remarks."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from smp_strategy.conversion.contents import Contents
from smp_strategy.errors import CheckpointError

__all__ = ["check_output", "num_entries", "show_progress", "tell"]


def check_output(given: Namespace) -> Path:
    """Where the result goes.

    Raises:
        CheckpointError: there is something already that is not to be replaced, or it would replace what is read.
    """
    source, target = Path(given.checkpoint), Path(given.out)
    if not os.path.lexists(target):
        return target
    if not given.overwrite:
        raise CheckpointError(f"{target} is there already. Give another name, or --overwrite.")
    real, read = target.resolve(), source.resolve()
    if real == read or real in read.parents:
        raise CheckpointError(f"{target} has what is to be read, so it is not overwritten. Give another name.")
    if target.is_dir() and not _is_ours_to_replace(target):
        raise CheckpointError(
            f"{target} is a directory with other things than a checkpoint, so it is not overwritten. Give another name."
        )
    return target


def _is_ours_to_replace(directory: Path) -> bool:
    """A directory is replaced as a whole, so nothing but a checkpoint may be lost."""
    names = [each.name for each in directory.iterdir()]
    return not names or any(name in (".metadata", "config.json") or name.endswith(".safetensors") for name in names)


def num_entries(contents: Contents) -> int:
    """What there is to write of weights and optimizers, by name."""
    return len(contents.weights) + sum(len(optimizer.state) for optimizer in contents.optimizers)


@contextmanager
def show_progress(total: int, *, is_quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; the function in here is told the name of each of the ``total`` things when it is done."""
    if is_quiet or not sys.stderr.isatty():
        yield lambda name: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def tell(lines: Sequence[str]) -> None:
    """What the user should know, beside what was asked for."""
    for line in lines:
        print(line, file=sys.stderr)
