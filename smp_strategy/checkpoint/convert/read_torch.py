"""Reads files of ``torch.save``: mapped into memory, plain values only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor, map_tensors
from smp_strategy.checkpoint.convert.layouts import contents_of
from smp_strategy.checkpoint.storage.full_file import read_full
from smp_strategy.checkpoint.storage.full_file_digests import has_digests
from smp_strategy.errors import CheckpointError

__all__ = ["open_torch_file", "read_dict"]


def read_dict(path: Path, *, verify: bool = True) -> dict[str, Any]:
    """The dict in a file, its tensors as :class:`LazyTensor`.

    Args:
        path: File.
        verify: Compare all of it to its digests, if it has some.

    Raises:
        CheckpointError: it is damaged, has no dict, or names classes, which could run code.
    """
    found = read_full(path, verify=verify)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} has no dict with weights, but a {type(found).__name__}.")
    return {key: map_tensors(value, LazyTensor.of) for key, value in found.items()}


def open_torch_file(path: Path, *, weights_at: str | None = None, verify: bool = True) -> CheckpointContents:
    """Open a Lightning checkpoint, a script's own dict, or a bare state dict.

    Args:
        path: File.
        weights_at: See :func:`~smp_strategy.checkpoint.convert.layouts.contents_of`.
        verify: See :func:`read_dict`.

    Raises:
        CheckpointError: it cannot be read, or has no weights.
    """
    found = contents_of(read_dict(path, verify=verify), kind="PyTorch file", source=str(path), weights_at=weights_at)
    found.has_digests = has_digests(path)
    return found
