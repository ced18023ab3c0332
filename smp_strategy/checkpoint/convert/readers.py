"""Reads sharded folders, files of ``torch.save``, folders of Hugging Face, and those of Accelerate's ``save_state``.

Sharded folders are those of PyTorch's distributed checkpoints: ours, Lightning's, FSDP's, and those of a plain
``dcp.save``. Files are mapped into memory, and have plain values only. ``save_state``, plain or with us, puts
optimizers, schedulers and random states beside the weights; with ``state_dict_type="sharded"`` weights and optimizers
are in a sharded folder.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor
from smp_strategy.checkpoint.convert.layouts import contents_of, parameter_shapes, read_optimizer
from smp_strategy.checkpoint.convert.safetensors import indexed, open_safetensors
from smp_strategy.checkpoint.sources import put, with_spread
from smp_strategy.checkpoint.state_dict import with_lists
from smp_strategy.checkpoint.storage import verified_reads
from smp_strategy.checkpoint.storage.full_file import read_full
from smp_strategy.checkpoint.storage.full_file_checksums import has_checksums
from smp_strategy.checkpoint.storage.manifest import FILE_NAME as MANIFEST
from smp_strategy.checkpoint.storage.path_kind import SHARDED_STATE, CheckpointKind
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.remote_path import AnyPath
from smp_strategy.checkpoint.storage.torch_load import allowing_plain_values
from smp_strategy.config.sizes import show_count
from smp_strategy.errors import CheckpointError

__all__ = ["open_sharded", "open_torch_file", "read_dict", "open_state", "open_weights"]


def open_sharded(path: AnyPath, *, weights_at: str | None = None) -> CheckpointContents:
    """Open a folder; tensors are read later, and verified then if there are digests.

    Args:
        path: Folder.
        weights_at: See :func:`~smp_strategy.checkpoint.convert.layouts.contents_of`.

    Raises:
        CheckpointError: it is damaged, or has no weights.
    """
    stored = CheckpointReader.open(path)
    aliases = stored.aliases
    tree: dict[str, Any] = {}
    for name, described in stored.tensors.items():
        memory = (str(path), aliases.get(name, name))
        lazy = LazyTensor(described.shape, described.dtype, partial(stored.read, name), memory)
        put(tree, stored.paths[name], lazy)
    with allowing_plain_values():
        for name, value in stored.read_objects(stored.objects).items():
            put(tree, stored.paths[name], value)
        rest = stored.rest()
    rest = with_spread(rest, tree)
    tree = with_lists(tree, int)  # which are stored item by item
    found = contents_of(tree, kind="sharded checkpoint", source=str(path), rest=rest, weights_at=weights_at)
    found.note = dict(stored.note) or found.note
    found.has_digests = stored.has_digests
    return found


def read_dict(path: Path, *, verify: bool = True) -> dict[str, Any]:
    """The dict in a file, its tensors as :class:`LazyTensor`.

    Raises:
        CheckpointError: it is damaged, has no dict, or names classes, which could run code.
    """
    found = read_full(path, verify=verify)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} has no dict with weights, but a {type(found).__name__}.")
    return {key: tree_map_only(Tensor, LazyTensor.of, value) for key, value in found.items()}


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
    found.has_digests = has_checksums(path)
    return found


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
        verified_reads.verify(path)
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
