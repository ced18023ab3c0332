"""Contents as safetensors, or as a directory of Hugging Face.

All is written beside its place and moved there when it is complete, so whatever goes wrong leaves what was there.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from smp_strategy.checkpoint.convert.contents import Contents, LazyTensor
from smp_strategy.checkpoint.convert.prefixes import strip_prefix
from smp_strategy.checkpoint.convert.safetensors import write_safetensors
from smp_strategy.checkpoint.convert.write_hugging_face import (
    copy_configuration,
    hugging_face_weights,
    main_dtype,
    read_configuration,
)
from smp_strategy.checkpoint.storage.atomic_commit import Check, replacing
from smp_strategy.checkpoint.storage.path_kind import check_replaceable

__all__ = ["Progress", "cast", "export_hugging_face", "export_safetensors", "plain_weights"]

Progress = Callable[[str], None]


def cast(weights: Mapping[str, LazyTensor], dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """Floating point tensors in ``dtype``; ``None``: as they are."""
    if dtype is None:
        return dict(weights)
    return {
        name: tensor.changed(lambda values: values.to(dtype), dtype) if tensor.dtype.is_floating_point else tensor
        for name, tensor in weights.items()
    }


def plain_weights(contents: Contents, prefix: str | None) -> tuple[dict[str, LazyTensor], list[str]]:
    """The weights under their names in the checkpoint, less ``prefix``; and what was left out."""
    weights: dict[str, Any] = contents.weight_tensors()
    remarks = [f"`{name}` was left out: it is no tensor." for name in contents.weights if name not in weights]
    found, others = strip_prefix(weights, prefix or "")
    if others:
        remarks.append(f"{len(others)} tensors were left out, as they do not begin with `{prefix}`.")
    return found, remarks


def export_safetensors(
    weights: Mapping[str, LazyTensor],
    target: Path,
    *,
    max_bytes: int,
    progress: Progress = lambda name: None,
    check: Check = check_replaceable,
) -> None:
    """Write ``weights`` to the directory ``target``, in place of what is there.

    Args:
        weights: by the names that they get.
        target: the directory.
        max_bytes: of tensors in one file; so much is in memory.
        progress: is told each name.
        check: see :func:`~smp_strategy.checkpoint.storage.atomic_commit.begin`.
    """
    with replacing(target, is_folder=True, check=check) as staging:
        write_safetensors(staging, weights, max_bytes=max_bytes, progress=progress)


def export_hugging_face(
    contents: Contents,
    target: Path,
    configuration: Path,
    *,
    prefix: str | None,
    dtype: torch.dtype | None,
    max_bytes: int,
    progress: Progress = lambda name: None,
    check: Check = check_replaceable,
) -> list[str]:
    """Write a directory for ``from_pretrained``, in place of what is there.

    Args:
        contents: of a checkpoint.
        target: the directory.
        configuration: a directory with the model's ``config.json``, or that file.
        prefix: see :func:`~smp_strategy.checkpoint.convert.write_hugging_face.hugging_face_weights`.
        dtype: of floating point weights; ``None``: as they are.
        max_bytes: of tensors in one file; so much is in memory.
        progress: is told each name.
        check: see :func:`~smp_strategy.checkpoint.storage.atomic_commit.begin`.

    Returns:
        What was left out or changed.

    Raises:
        CheckpointError: the prefix cannot be told, or something cannot be read.
    """
    found, remarks = hugging_face_weights(contents, read_configuration(configuration), prefix)
    weights = cast(found, dtype)
    with replacing(target, is_folder=True, check=check) as staging:
        write_safetensors(staging, weights, max_bytes=max_bytes, progress=progress)
        copy_configuration(configuration, staging, main_dtype(weights))
    return remarks
