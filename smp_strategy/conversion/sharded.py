"""Directories of PyTorch's distributed checkpoints: ours, Lightning's, those of FSDP, and of a plain ``dcp.save``."""

from functools import partial
from pathlib import Path
from typing import Any

from smp_strategy.conversion.contents import Contents, LazyTensor, nested
from smp_strategy.conversion.layouts import contents_of
from smp_strategy.storage.stored import Stored

__all__ = ["open_sharded"]


def open_sharded(path: Path, *, weights_at: str | None = None) -> Contents:
    """Open a directory; tensors are read later, and verified then if there are digests.

    Args:
        path: the directory.
        weights_at: see :func:`~smp_strategy.conversion.layouts.contents_of`.

    Raises:
        CheckpointError: it is damaged, or has no weights.
    """
    stored = Stored.open(path)
    flat: dict[tuple[str, ...], Any] = {}
    for name, info in stored.tensors.items():
        flat[stored.paths[name]] = LazyTensor(
            tuple(info.shape), info.dtype, partial(stored.read, name), stored.place(name)
        )
    for name, value in stored.read_objects(stored.objects).items():
        flat[stored.paths[name]] = value
    found = contents_of(
        nested(flat), kind="sharded checkpoint", source=str(path), rest=stored.rest(), weights_at=weights_at
    )
    found.note = dict(stored.note)
    return found
