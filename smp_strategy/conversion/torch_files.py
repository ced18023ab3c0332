"""Files that ``torch.save`` has written: mapped into memory, and only values are made of what they say."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smp_strategy.conversion.contents import Contents, LazyTensor, map_tensors
from smp_strategy.conversion.layouts import contents_of
from smp_strategy.errors import CheckpointError

__all__ = ["load_torch_file", "open_torch_file"]


def load_torch_file(path: Path) -> Any:
    """What a file has; tensors are mapped, and read when they are used.

    Raises:
        CheckpointError: it is damaged, of another kind, or names classes, which could run code.
    """
    try:
        # Files of older versions of PyTorch are no zip files, and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not read, as it is damaged or not made of values only: {_first(error)}"
        ) from error
    except (RuntimeError, ValueError, KeyError, TypeError, EOFError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged, or no file of PyTorch: {_first(error)}") from error


def _first(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def open_torch_file(path: Path, *, weights_at: str | None = None) -> Contents:
    """A Lightning checkpoint, a script's own dict, or a bare state dict.

    Args:
        path: the file.
        weights_at: see :func:`~smp_strategy.conversion.layouts.contents_of`.

    Raises:
        CheckpointError: it cannot be read, or has no weights.
    """
    tree = load_torch_file(path)
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{path} has no dict with weights, but a {type(tree).__name__}.")
    lazy = map_tensors(dict(tree), LazyTensor.of)
    return contents_of(lazy, kind="PyTorch file", source=str(path), weights_at=weights_at)
