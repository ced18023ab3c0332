"""The command ``smp export``.

Shared parts of the commands: checks of the output path, progress bar, messages.
"""

import filecmp
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from smp_strategy.checkpoint.convert.contents import CheckpointContents
from smp_strategy.checkpoint.convert.detect_format import open_checkpoint
from smp_strategy.checkpoint.convert.layouts import strip_prefix
from smp_strategy.checkpoint.convert.merge_adapters import merge_adapters
from smp_strategy.checkpoint.convert.writers import (
    Progress,
    cast,
    export_hugging_face,
    export_safetensors,
    is_copied,
    plain_weights,
    save_full,
    save_sharded,
)
from smp_strategy.checkpoint.storage.atomic_commit import Check
from smp_strategy.checkpoint.storage.path_kind import check_folder, check_replaceable, foreign_entries, reason_to_keep
from smp_strategy.checkpoint.storage.remote_path import AnyPath, RemotePath, any_path, local_path
from smp_strategy.config.sizes import show_count
from smp_strategy.errors import CheckpointError, printable

__all__ = ["run", "check_output", "num_entries", "on_this_machine", "show_progress", "tell"]


def run(given: Namespace) -> int:
    """Run the command; returns its exit status."""
    (target, check), dtype = check_output(given), _dtype(given.dtype)
    contents = open_checkpoint(any_path(given.checkpoint), weights_at=given.weights)
    is_all = given.hf is None and given.form != "safetensors"
    merged = _merge(contents, given, is_all=is_all)
    with show_progress(num_entries(contents) if is_all else len(contents.weights), is_quiet=given.quiet) as progress:
        if given.hf is not None:
            remarks = export_hugging_face(
                contents,
                on_this_machine(target),
                Path(given.hf),
                prefix=given.prefix,
                dtype=dtype,
                max_bytes=given.max_shard_size,
                progress=progress,
                check=check,
            )
        elif given.form == "safetensors":
            weights, remarks = plain_weights(contents, given.prefix)
            export_safetensors(
                cast(weights, dtype),
                on_this_machine(target),
                max_bytes=given.max_shard_size,
                progress=progress,
                check=check,
            )
        else:
            remarks = _save(contents, target, given, dtype, progress, check)
    if not is_all:
        remarks += _left_behind(contents)
    if not given.quiet:
        tell([*contents.remarks, *merged, *remarks, f"{given.checkpoint} ({contents.kind}) -> {target}"])
    return 0


def _merge(contents: CheckpointContents, given: Namespace, *, is_all: bool) -> list[str]:
    if given.merge_adapters is None:
        return []
    if is_all:
        raise CheckpointError(
            f"--merge-adapters is for safetensors and --hf, and --form {given.form} keeps what training needs."
        )
    return merge_adapters(contents, Path(given.merge_adapters))


def _save(
    contents: CheckpointContents,
    target: AnyPath,
    given: Namespace,
    dtype: torch.dtype | None,
    progress: Progress,
    check: Check,
) -> list[str]:
    remarks = []
    if dtype is not None:
        raise CheckpointError(f"--dtype is for safetensors, and --form {given.form} keeps what training needs.")
    if given.prefix:
        contents.weights, others = strip_prefix(contents.weights, given.prefix)
        remarks = [f"{show_count(len(others), 'weight')} left out, not beginning with `{given.prefix}`."] * bool(others)
        if contents.optimizers:
            contents.optimizers = []
            remarks.append("The state of optimizers was left out: weights have got other names.")
    if given.form == "sharded":
        save_sharded(contents, target, progress, check)
    else:
        save_full(contents, on_this_machine(target), progress, check)
    return remarks


def _left_behind(contents: CheckpointContents) -> list[str]:
    if not contents.optimizers:
        return []
    return [f"The state of {show_count(len(contents.optimizers), 'optimizer')} was left out: only weights go there."]


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise CheckpointError(f"--dtype {name} is no floating point type of PyTorch. Write bfloat16, for example.")
    return found


def check_output(given: Namespace) -> tuple[AnyPath, Check]:
    """Path of the output, and the check to repeat just before it is replaced, maybe hours later.

    Raises:
        CheckpointError: an existing path must not be replaced, or is part of the input.
        ConfigError: the path is below a file, a device, a FIFO or a socket.
    """
    source, target, hugging_face = any_path(given.checkpoint), any_path(given.out), getattr(given, "hf", None)

    def check(place: AnyPath) -> None:
        if isinstance(place, Path) and os.path.lexists(place):
            _check_there(place, source, hugging_face, overwrite=given.overwrite)
        elif isinstance(place, RemotePath) and place.exists():
            _check_object(place, source, overwrite=given.overwrite)

    if given.form != "sharded":
        on_this_machine(target)
    check(target)
    if isinstance(target, Path):
        check_folder(target.parent)
    return target, check


def on_this_machine(target: AnyPath) -> Path:
    """``target``, which must not be an address.

    Raises:
        CheckpointError: it is one.
    """
    return local_path(target, "and only --form sharded is written to one. Give a path of this machine, and copy that.")


def _check_object(target: RemotePath, source: AnyPath, *, overwrite: bool) -> None:
    if not overwrite:
        raise CheckpointError(f"{target} is there already. Give another name, or --overwrite.")
    if target == source:
        raise CheckpointError(f"{target} has what is to be read, so it is not overwritten. Give another name.")
    check_replaceable(target)


def _check_there(target: Path, source: AnyPath, hugging_face: str | None, *, overwrite: bool) -> None:
    if not overwrite:
        raise CheckpointError(f"{target} is there already. Give another name, or --overwrite.")
    if isinstance(source, Path):
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
    with ProgressBar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=printable(name, lines=False))


def tell(lines: Sequence[str]) -> None:
    """Print messages to stderr, beside the output that was asked for."""
    for line in lines:
        print(printable(line, lines=False), file=sys.stderr)
