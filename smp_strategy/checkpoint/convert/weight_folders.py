"""Reads folders of weights in the layout of Hugging Face, and folders of Accelerate's ``save_state``.

``save_state``, plain or with us, puts optimizers, schedulers and random states beside the weights; with
``state_dict_type="sharded"`` weights and optimizers are in a sharded folder.
"""

from pathlib import Path
from typing import Any

from smp_strategy.checkpoint.convert.contents import CheckpointContents
from smp_strategy.checkpoint.convert.layouts import contents_of, parameter_shapes, read_optimizer
from smp_strategy.checkpoint.convert.read_dcp import open_sharded
from smp_strategy.checkpoint.convert.read_torch import read_dict
from smp_strategy.checkpoint.convert.safetensors import indexed, open_safetensors
from smp_strategy.checkpoint.storage import folder_digests
from smp_strategy.checkpoint.storage.manifest import FILE_NAME as MANIFEST
from smp_strategy.checkpoint.storage.path_kind import SHARDED_STATE, CheckpointKind
from smp_strategy.config.sizes import show_count
from smp_strategy.errors import CheckpointError

__all__ = ["open_state", "open_weights"]


def open_state(path: Path, *, weights_at: str | None = None, verify: bool = True) -> CheckpointContents:
    """Open a folder of Accelerate's ``save_state``, with us or without.

    Args:
        path: Folder.
        weights_at: See :func:`~smp_strategy.checkpoint.convert.layouts.contents_of`.
        verify: Compare the files to their digests now, if there are some.

    Raises:
        CheckpointError: it is damaged, or has no weights, or those of several models.
    """
    if verify:
        folder_digests.verify(path)
    if (path / SHARDED_STATE).is_dir():
        found = open_sharded(path / SHARDED_STATE, weights_at=weights_at)
    else:
        found = open_weights(path)
        found.has_digests = (path / MANIFEST).is_file()
    shapes = parameter_shapes(found.weights)
    taken = sorted(path.glob("optimizer*.bin"), key=lambda each: (len(each.name), each.name))
    for file in taken:
        optimizer = read_optimizer(read_dict(file), shapes, file.name, found.remarks)
        if optimizer is None:
            break
        found.optimizers.append(optimizer)
    others = [each for pattern in ("*.bin", "*.pkl", "scaler.pt") for each in path.glob(pattern)]
    left = [each for each in others if each not in taken and not each.name.startswith(("model", "pytorch_model"))]
    if left:
        found.remarks.append(f"{show_count(len(left), 'file')} of Accelerate's left out: schedulers, random states.")
    found.kind = CheckpointKind.STATE.value
    return found


def open_weights(path: Path) -> CheckpointContents:
    """Open a folder with safetensors, or with files of ``torch.save`` under Hugging Face's names.

    Raises:
        CheckpointError: something of it is lacking or damaged, or there are several sets of weights.
    """
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return open_safetensors(path)
    indices = sorted(path.glob("*.bin.index.json"))
    files = [each for name in ("pytorch_model", "model") if (each := path / f"{name}.bin").is_file()]
    if len(indices or files) != 1:
        several = ", ".join(each.name for each in indices or files) or "none of model.safetensors and pytorch_model.bin"
        raise CheckpointError(f"{path} must have one set of weights, but has {several}. Give one file.")
    tree: dict[str, Any] = {}
    for file, names in indexed(indices[0]).items() if indices else [(files[0], None)]:
        part = read_dict(file)
        lacking = [name for name in names or () if name not in part]
        if lacking:
            raise CheckpointError(f"{file} lacks `{lacking[0]}`, which {indices[0].name} says is in it.")
        tree.update(part if names is None else {name: part[name] for name in names})
    return contents_of(tree, kind="PyTorch files", source=str(path))
