"""Writes checkpoints in our own forms: a sharded folder, or a full file of Lightning.

PyTorch writes a file from tensors in memory, all of which must be there. Tensors mapped from a file take no memory
until they are used, and can be dropped again. Others are read into a scratch file that is mapped as well. It has no
name, so it goes with the process, however that ends.
"""

import mmap
import os
import tempfile
from collections.abc import Hashable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor, OptimizerContents, map_tensors
from smp_strategy.checkpoint.convert.layouts import PARAMETER_NAMES, numbered_groups
from smp_strategy.checkpoint.convert.write_hugging_face import Progress
from smp_strategy.checkpoint.storage.atomic_commit import Check, saving
from smp_strategy.checkpoint.storage.full_file import write_full
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor
from smp_strategy.checkpoint.storage.path_kind import check_replaceable
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.errors import CheckpointError

__all__ = ["Scratch", "lightning_rest", "save_full", "save_sharded"]


@final
class Scratch:
    """Scratch file that reads each tensor once, whatever the number of its names; a context manager.

    Args:
        folder: Folder on a disk that has room.
    """

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


def lightning_rest(contents: CheckpointContents) -> dict[str, Any]:
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
            **map_tensors(lightning_rest(contents), scratch.tensor, LazyTensor),
            "state_dict": _read(contents.weights, scratch, progress),
        }
        if contents.optimizers:
            content["optimizer_states"] = [_numbered(each, scratch, progress) for each in contents.optimizers]
            content[PARAMETER_NAMES] = [
                [list(group["params"]) for group in each.groups] for each in contents.optimizers
            ]
        write_full(target, content, check=check)


def save_sharded(
    contents: CheckpointContents, target: Path, progress: Progress = lambda name: None, check: Check = check_replaceable
) -> None:
    """Write a sharded folder, as several ranks do together, replacing an existing one.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    check(target)
    with saving(target), _scratch(target) as scratch:
        state: dict[str, Any] = {"state_dict": _with_aliases(_read(contents.weights, scratch, progress))}
        for number, optimizer in enumerate(contents.optimizers):
            kept = {name: _encoded(value) for name, value in _read(optimizer.state, scratch, progress).items()}
            state[f"optimizer_{number}"] = {"state": kept, "param_groups": optimizer.groups}
        rest = map_tensors(lightning_rest(contents), scratch.tensor, LazyTensor)
        ShardedWriter().prepare(state, copy=False).write(target, rest=rest, note=contents.note, check=check)


def _scratch(target: Path) -> Scratch:
    target.parent.mkdir(parents=True, exist_ok=True)
    return Scratch(target.parent)


def _read(values: dict[str, Any], scratch: Scratch, progress: Progress) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        found[name] = map_tensors(value, scratch.tensor, LazyTensor)
        progress(name)
    return found


def _numbered(optimizer: OptimizerContents, scratch: Scratch, progress: Progress) -> dict[str, Any]:
    groups, numbers = numbered_groups(optimizer.groups)
    kept = {numbers[name]: value for name, value in _read(optimizer.state, scratch, progress).items()}
    return {"state": dict(sorted(kept.items())), "param_groups": groups}


def _with_aliases(weights: dict[str, Any]) -> dict[str, Any]:
    """Each tensor once, with all of its names."""
    names: dict[int, list[str]] = {}
    for name, value in weights.items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
    found: dict[str, Any] = {}
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            found[name] = value
        elif (every := names[id(value)])[0] == name:
            found[name] = HeldTensor.whole(value, aliases=tuple(every[1:]))
    return found


def _encoded(value: Any) -> Any:
    """The engine's encoding: lists with tensors are dicts with the keys ``#0``, ``#1``."""
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        value = {f"#{number}": item for number, item in enumerate(value)}
    if isinstance(value, dict):
        return {str(key): _encoded(item) for key, item in value.items()}
    return HeldTensor.whole(value) if isinstance(value, Tensor) else value
