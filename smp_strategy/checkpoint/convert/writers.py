"""Writes checkpoints in our own forms, and weights as safetensors or as a folder for ``from_pretrained``.

PyTorch writes a file from tensors in memory, all of which must be there. Tensors mapped from a file take no memory
until they are used, and can be dropped again. Others are read into a scratch file that is mapped as well. It has no
name, so it goes with the process, however that ends.

Exports weights as safetensors, or as a folder for ``from_pretrained`` of Hugging Face's transformers.

Such a folder has the configuration, the tokenizer and the like of another one, the pretrained model's. Weights have the
names that the model gives them. Tied ones are saved once, as the model ties them again.

Everything is written beside its place and moved there when it is complete, so a failure leaves the old folder.
"""

import json
import mmap
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor, OptimizerContents
from smp_strategy.checkpoint.convert.layouts import PARAMETER_NAMES, find_prefix, numbered_groups, strip_prefix
from smp_strategy.checkpoint.convert.safetensors import write_safetensors
from smp_strategy.checkpoint.state_dict import encoded
from smp_strategy.checkpoint.storage.atomic_commit import Check, replacing, saving
from smp_strategy.checkpoint.storage.full_file import write_full
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, with_aliases
from smp_strategy.checkpoint.storage.path_kind import check_replaceable
from smp_strategy.checkpoint.storage.remote_path import AnyPath
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.errors import CheckpointError

__all__ = [
    "Scratch",
    "save_full",
    "save_sharded",
    "Progress",
    "cast",
    "copy_configuration",
    "export_hugging_face",
    "export_safetensors",
    "hugging_face_weights",
    "is_copied",
    "main_dtype",
    "plain_weights",
    "without_tied",
]


CONFIG: Final = "config.json"
# Everything but weights: configurations, vocabularies, templates, the model's own code.
_COPIED: Final = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.bpe.codes")
_NOT_COPIED: Final = ("*.index.json", "trainer_state.json")


def _read_configuration(path: Path) -> dict[str, Any]:
    """Configuration of a model, from a folder with ``config.json``, or from such a file.

    Raises:
        CheckpointError: there is none.
    """
    file = path / CONFIG if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} has no configuration of a Hugging Face model ({CONFIG}): {error}. Write one with "
            "`model.config.save_pretrained(DIRECTORY)`."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is no configuration of a Hugging Face model: it has no keys and values.")
    return found


def hugging_face_weights(
    contents: CheckpointContents, configuration: Mapping[str, Any], prefix: str | None
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Weights under the model's own names.

    Args:
        contents: Content of the checkpoint.
        configuration: Configuration of the model.
        prefix: Prefix of the names in the checkpoint; ``None``: the LightningModule's attribute, if it is one.

    Returns:
        The weights, and remarks on others.

    Raises:
        CheckpointError: the prefix cannot be told, or nothing begins with it.
    """
    weights = contents.weight_tensors()
    remarks = [f"`{name}` was left out: it is no tensor." for name in contents.weights if name not in weights]
    if prefix is None:
        prefix = find_prefix(weights) if contents.is_lightning else ""
        if prefix:
            remarks.append(f"`{prefix}` was taken away from the names.")
    found, others = strip_prefix(weights, prefix)
    if others:
        remarks.append(f"{len(others)} tensors were left out, as they do not begin with `{prefix}`: {_some(others)}.")
    kept, tied = without_tied(found, configuration)
    remarks += [f"`{name}` was left out: it is tied to `{first}`." for name, first in tied.items()]
    return kept, remarks


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def without_tied(
    weights: Mapping[str, LazyTensor], configuration: Mapping[str, Any]
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Leave out weights that the model ties again; returns the rest, and the first name of each that was left out.

    Tensors that share memory in the checkpoint are tied. Where it does not tell, as other programs may have written
    both, those of the size of the vocabulary are compared.
    """
    if configuration.get("tie_word_embeddings") is False:
        return dict(weights), {}
    parts = [configuration, *(value for value in configuration.values() if isinstance(value, dict))]
    sizes = {part["vocab_size"] for part in parts if "vocab_size" in part}
    first: dict[object, str] = {}
    large: list[str] = []
    same: dict[str, str] = {}
    for name, tensor in weights.items():
        if tensor.memory is not None and first.setdefault(tensor.memory, name) != name:
            same[name] = first[tensor.memory]
        elif len(tensor.shape) == 2 and tensor.shape[0] in sizes:
            twin = next((other for other in large if _are_equal(weights[other], tensor)), None)
            if twin is None:
                large.append(name)
            else:
                same[name] = twin
    return {name: tensor for name, tensor in weights.items() if name not in same}, same


def _are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.read(), other.read())


def main_dtype(weights: Mapping[str, LazyTensor]) -> torch.dtype | None:
    """Dtype of most bytes of floating point weights; ``None``: there are none."""
    bytes_in: Counter[torch.dtype] = Counter()
    for tensor in weights.values():
        if tensor.dtype.is_floating_point:
            bytes_in[tensor.dtype] += tensor.num_bytes
    return max(bytes_in, key=bytes_in.__getitem__, default=None)


def is_copied(name: str) -> bool:
    """Whether :func:`copy_configuration` copies a file of this name."""
    return any(fnmatch(name, each) for each in _COPIED) and not any(fnmatch(name, each) for each in _NOT_COPIED)


def copy_configuration(source: Path, target: Path, dtype: torch.dtype | None) -> list[str]:
    """Copy everything but weights to the folder ``target``; returns the names of the files.

    Args:
        source: Folder, or only the file with the configuration.
        target: Existing folder.
        dtype: Dtype of the weights beside it; the model is loaded in this.
    """
    configuration = _read_configuration(source)
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in configuration and "dtype" not in configuration else "dtype"
        configuration[key] = str(dtype).removeprefix("torch.")
    (target / CONFIG).write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")
    copied = [CONFIG]
    for file in sorted(source.iterdir()) if source.is_dir() else ():
        if file.is_file() and file.name != CONFIG and is_copied(file.name):
            shutil.copyfile(file, target / file.name)
            copied.append(file.name)
    return copied


Progress = Callable[[str], None]


def cast(weights: Mapping[str, LazyTensor], dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """Convert floating point tensors to ``dtype``; ``None``: as they are."""
    if dtype is None:
        return dict(weights)
    return {
        name: tensor.changed(lambda values: values.to(dtype), dtype) if tensor.dtype.is_floating_point else tensor
        for name, tensor in weights.items()
    }


def plain_weights(contents: CheckpointContents, prefix: str | None) -> tuple[dict[str, LazyTensor], list[str]]:
    """Weights under their names in the checkpoint, less ``prefix``; and remarks on those left out."""
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
    """Write ``weights`` to the folder ``target``, replacing an existing one.

    Args:
        weights: Weights by their new names.
        target: Folder.
        max_bytes: Bytes of tensors in one file.
        progress: Called with each name.
        check: See :func:`~smp_strategy.checkpoint.storage.atomic_commit.begin`.
    """
    with replacing(target, is_folder=True, check=check) as staging:
        write_safetensors(staging, weights, max_bytes=max_bytes, progress=progress)


def export_hugging_face(
    contents: CheckpointContents,
    target: Path,
    configuration: Path,
    *,
    prefix: str | None,
    dtype: torch.dtype | None,
    max_bytes: int,
    progress: Progress = lambda name: None,
    check: Check = check_replaceable,
) -> list[str]:
    """Write a folder for ``from_pretrained``, replacing an existing one.

    Args:
        contents: Content of a checkpoint.
        target: Folder.
        configuration: Folder with the model's ``config.json``, or that file.
        prefix: See :func:`~smp_strategy.checkpoint.convert.writers.hugging_face_weights`.
        dtype: Dtype of floating point weights; ``None``: as they are.
        max_bytes: Bytes of tensors in one file.
        progress: Called with each name.
        check: See :func:`~smp_strategy.checkpoint.storage.atomic_commit.begin`.

    Returns:
        Remarks on weights that were left out or changed.

    Raises:
        CheckpointError: the prefix cannot be told, or something cannot be read.
    """
    found, remarks = hugging_face_weights(contents, _read_configuration(configuration), prefix)
    weights = cast(found, dtype)
    with replacing(target, is_folder=True, check=check) as staging:
        write_safetensors(staging, weights, max_bytes=max_bytes, progress=progress)
        copy_configuration(configuration, staging, main_dtype(weights))
    return remarks


@final
class Scratch:
    """Scratch file that reads each tensor once, whatever the number of its names; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._size = 0
        self._known: dict[Hashable, Tensor] = {}

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._known.clear()
        self._file.close()

    def tensor(self, lazy: LazyTensor) -> Tensor:
        """Values of ``lazy``; the same memory for tensors that share it."""
        if lazy.memory is None:
            return self._kept(lazy)
        key = (lazy.memory, lazy.dtype)
        if key not in self._known:
            self._known[key] = self._kept(lazy)
        return self._known[key]

    def _kept(self, lazy: LazyTensor) -> Tensor:
        values = lazy.read()
        if lazy.is_mapped or not values.numel() or values.layout != torch.strided:
            return values
        start = -(-self._size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._size = start + values.nbytes
        # Allocated first: writing to mapped memory on a full disk kills the process by SIGBUS.
        os.posix_fallocate(self._file.fileno(), start, values.nbytes)
        memory = mmap.mmap(self._file.fileno(), values.nbytes, offset=start)
        kept = torch.frombuffer(memory, dtype=values.dtype).view(values.shape)
        return kept.copy_(values)


def _lightning_rest(contents: CheckpointContents) -> dict[str, Any]:
    """Entries of a Lightning checkpoint besides weights and optimizers; those of a new run, if none are known.

    Raises:
        CheckpointError: Lightning, whose version must be written, is not installed.
    """
    if contents.is_lightning:
        return contents.rest
    for package in ("lightning", "pytorch-lightning"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        begun: dict[str, Any] = {} if contents.optimizers else {"optimizer_states": []}
        return {"epoch": 0, "global_step": 0, "pytorch-lightning_version": found, "lr_schedulers": [], **begun}
    raise CheckpointError("Lightning is not installed, and its checkpoints tell which version has written them.")


def save_full(
    contents: CheckpointContents, target: Path, progress: Progress = lambda name: None, check: Check = check_replaceable
) -> None:
    """Write a full file as Lightning does, replacing an existing one; parameters of optimizers have numbers.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    check(target)
    with saving(target), _scratch(target) as scratch:
        content = {
            **tree_map_only(LazyTensor, scratch.tensor, _lightning_rest(contents)),
            "state_dict": _read(contents.weights, scratch, progress),
        }
        if contents.optimizers:
            content["optimizer_states"] = [_numbered(each, scratch, progress) for each in contents.optimizers]
            content[PARAMETER_NAMES] = [
                [list(group["params"]) for group in each.groups] for each in contents.optimizers
            ]
        write_full(target, content, check=check)


def save_sharded(
    contents: CheckpointContents,
    target: AnyPath,
    progress: Progress = lambda name: None,
    check: Check = check_replaceable,
) -> None:
    """Write a sharded folder, as several ranks do together, replacing an existing one.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    check(target)
    with saving(target), _scratch(target) as scratch:
        state: dict[str, Any] = {"state_dict": with_aliases(_held(_read(contents.weights, scratch, progress)))}
        for number, optimizer in enumerate(contents.optimizers):
            read = _read(optimizer.state, scratch, progress)
            kept = {name: encoded(value, lambda _, leaf: HeldTensor.whole(leaf)) for name, value in read.items()}
            state[f"optimizer_{number}"] = {"state": kept, "param_groups": optimizer.groups}
        rest = tree_map_only(LazyTensor, scratch.tensor, _lightning_rest(contents))
        ShardedWriter().prepare(state, copy=False).write(target, rest=rest, note=contents.note, check=check)


def _scratch(target: AnyPath) -> Scratch:
    if not isinstance(target, Path):
        return Scratch(Path(tempfile.gettempdir()))
    target.parent.mkdir(parents=True, exist_ok=True)
    return Scratch(target.parent)


def _read(values: dict[str, Any], scratch: Scratch, progress: Progress) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        found[name] = tree_map_only(LazyTensor, scratch.tensor, value)
        progress(name)
    return found


def _numbered(optimizer: OptimizerContents, scratch: Scratch, progress: Progress) -> dict[str, Any]:
    groups, numbers = numbered_groups(optimizer.groups)
    kept = {numbers[name]: value for name, value in _read(optimizer.state, scratch, progress).items()}
    return {"state": dict(sorted(kept.items())), "param_groups": groups}


def _held(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights as whole tensors, one for all names of the same tensor."""
    held = {id(value): HeldTensor.whole(value) for value in weights.values() if isinstance(value, Tensor)}
    return {name: held.get(id(value), value) for name, value in weights.items()}
