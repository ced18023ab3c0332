"""The command ``smp export``."""

from argparse import Namespace
from pathlib import Path

import torch

from smp_strategy.checkpoint.convert.contents import CheckpointContents
from smp_strategy.checkpoint.convert.detect_format import open_checkpoint
from smp_strategy.checkpoint.convert.merge_adapters import merge_adapters
from smp_strategy.checkpoint.convert.names import strip_prefix
from smp_strategy.checkpoint.convert.write_hugging_face import (
    Progress,
    cast,
    export_hugging_face,
    export_safetensors,
    plain_weights,
)
from smp_strategy.checkpoint.convert.write_own import save_full, save_sharded
from smp_strategy.checkpoint.storage.atomic_commit import Check
from smp_strategy.checkpoint.tools.common import check_output, num_entries, show_progress, tell
from smp_strategy.config.sizes import show_count
from smp_strategy.errors import CheckpointError

__all__ = ["run"]


def run(given: Namespace) -> int:
    """Run the command; returns its exit status."""
    (target, check), dtype = check_output(given), _dtype(given.dtype)
    contents = open_checkpoint(Path(given.checkpoint), weights_at=given.weights)
    is_all = given.hf is None and given.form != "safetensors"
    merged = _merge(contents, given, is_all=is_all)
    with show_progress(num_entries(contents) if is_all else len(contents.weights), is_quiet=given.quiet) as progress:
        if given.hf is not None:
            remarks = export_hugging_face(
                contents,
                target,
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
                cast(weights, dtype), target, max_bytes=given.max_shard_size, progress=progress, check=check
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
    target: Path,
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
    save = save_full if given.form == "full" else save_sharded
    save(contents, target, progress, check)
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
