"""Format detection: opens a checkpoint of any kind (:mod:`smp_strategy.checkpoint.storage.path_kind`)."""

from collections.abc import Mapping
from pathlib import Path

from smp_strategy.checkpoint.convert.contents import CheckpointContents
from smp_strategy.checkpoint.convert.read_sagemaker import Shape, open_sagemaker
from smp_strategy.checkpoint.convert.readers import open_sharded, open_state, open_torch_file, open_weights
from smp_strategy.checkpoint.convert.safetensors import INDEX_ENDING, open_safetensors
from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage.path_kind import CHECKPOINTS, CheckpointKind, kind_of, unreadable
from smp_strategy.checkpoint.storage.remote_path import AnyPath, RemotePath
from smp_strategy.checkpoint.storage.sagemaker_folder import TaggedFolder
from smp_strategy.config.special_paths import special_file
from smp_strategy.errors import CheckpointError

__all__ = ["located", "open_checkpoint"]


def open_checkpoint(
    path: AnyPath,
    *,
    weights_at: str | None = None,
    like: Mapping[str, Shape] | None = None,
    verify: bool = True,
) -> CheckpointContents:
    """Open a checkpoint of any kind; tensors are read later.

    Args:
        path: File or folder; at an address it must be a sharded checkpoint.
        weights_at: Dotted keys of the weights; ``None``: one of the usual ones.
        like: Whole shapes of the weights, for parts of SageMaker's split layers.
        verify: Compare a file to its digests now. Reads of a folder are verified when they happen.

    Raises:
        CheckpointError: it cannot be read, or its kind is not known.
    """
    path = located(path)
    kind = kind_of(path)
    if reason := unreadable(path, kind):
        raise CheckpointError(reason)
    if kind is CheckpointKind.SHARDED:
        return open_sharded(path, weights_at=weights_at)
    assert isinstance(path, Path)
    if path.is_file():
        is_index = path.name.endswith(INDEX_ENDING)
        is_safe = kind is CheckpointKind.SAFETENSORS or path.suffix == ".safetensors" or is_index
        return open_safetensors(path) if is_safe else open_torch_file(path, weights_at=weights_at, verify=verify)
    if kind is CheckpointKind.STATE:
        return open_state(path, weights_at=weights_at, verify=verify)
    if kind is CheckpointKind.SAGEMAKER:
        return open_sagemaker(path, like=like)
    if kind is CheckpointKind.WEIGHTS:
        return open_weights(path)
    raise CheckpointError(_unknown(path))


def located(path: AnyPath) -> AnyPath:
    """``path`` itself, the newest checkpoint of a folder of tagged checkpoints, or the folder of a commit object.

    Raises:
        CheckpointError: there is nothing, or no file or folder.
    """
    path = commit.readable(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if isinstance(path, RemotePath):
        return path
    if kind := special_file(path):  # a read of it may never end
        raise CheckpointError(f"{path} is {kind}, and not a checkpoint. Give a file or a folder.")
    return _newest(path) if path.is_dir() and kind_of(path) is CheckpointKind.TAGGED else path


def _unknown(folder: Path) -> str:
    names = sorted(each.name for each in folder.iterdir())
    inside = [name for name in names if not name.startswith(".") and kind_of(folder / name) in CHECKPOINTS]
    if inside:
        return f"{folder} is no checkpoint, but has some in it: {', '.join(inside[:5])}. Give one of them."
    return (
        f"{folder} is no checkpoint of a known kind: it has no .metadata, no *.safetensors and no model_0_0.pt, but "
        f"{', '.join(names[:5])}. Give the directory itself, or a file."
    )


def _newest(folder: Path) -> Path:
    """The last checkpoint in a folder of SageMaker's library, or of ``smp_strategy.save_checkpoint``."""
    try:
        return TaggedFolder.to_read(folder, None, partial=True).partial
    except CheckpointError:
        return TaggedFolder.to_read(folder, None, partial=False).full
