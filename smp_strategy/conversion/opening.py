"""Which kind of checkpoint is this? Asked of the files, not of their names where that can be helped."""

from collections.abc import Mapping
from pathlib import Path

from smp_strategy.conversion.contents import Contents
from smp_strategy.conversion.joining import Shape
from smp_strategy.conversion.safetensors_files import open_safetensors
from smp_strategy.conversion.sagemaker import is_sagemaker, open_sagemaker
from smp_strategy.conversion.sharded import open_sharded
from smp_strategy.conversion.torch_files import open_torch_file
from smp_strategy.errors import CheckpointError
from smp_strategy.storage import commit
from smp_strategy.storage.stored import is_sharded
from smp_strategy.storage.tagged import TaggedFolder

__all__ = ["open_checkpoint"]


def open_checkpoint(
    path: Path,
    *,
    weights_at: str | None = None,
    like: Mapping[str, Shape] | None = None,
    verify: bool = True,
) -> Contents:
    """Open a checkpoint of any kind; tensors are read later.

    Args:
        path: a file or a directory.
        weights_at: the keys to the weights, with dots between; ``None``: one of the usual ones.
        like: whole shapes of the weights, for parts of SageMaker's split layers.
        verify: compare a file to its digests now. What is read of a directory is verified when it is.

    Raises:
        CheckpointError: it cannot be read, or what it is cannot be told.
    """
    commit.recover(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if path.is_file():
        is_safe = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        return open_safetensors(path) if is_safe else open_torch_file(path, weights_at=weights_at, verify=verify)
    if is_sharded(path):
        return open_sharded(path, weights_at=weights_at)
    if is_sagemaker(path):
        return open_sagemaker(path, like=like)
    if (path / "newest").is_file():
        return open_checkpoint(_newest(path), weights_at=weights_at, like=like, verify=verify)
    if any(path.glob("*.safetensors")):
        return open_safetensors(path)
    some = ", ".join(sorted(each.name for each in path.iterdir())[:5])
    raise CheckpointError(
        f"{path} is no checkpoint of a known kind: it has no .metadata, no *.safetensors and no model_0_0.pt, but "
        f"{some or 'nothing at all'}. Give the directory itself, or a file."
    )


def _newest(folder: Path) -> Path:
    """What was saved last in a folder of SageMaker's library, or of ``smp_strategy.save_checkpoint``."""
    try:
        return TaggedFolder.to_read(folder, None, partial=True).partial
    except CheckpointError:
        return TaggedFolder.to_read(folder, None, partial=False).full
