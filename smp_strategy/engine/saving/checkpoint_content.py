"""Checkpoints of Lightning's form: one dict, in a file or in a folder that all ranks have written.

For a folder the dict is split into stored tensors and ``meta.pt``. Lightning, its callbacks and the user build one
dict. Tensors that are spread over ranks (:class:`HeldTensor`) are stored by their ranks, under the names that
Lightning's own directories use. Global rank 0 writes everything else, unchanged, to ``meta.pt``::

    state_dict              state_dict.<name>
    optimizer_states[0]     optimizer_0.state.<name>.<key>, optimizer_0.param_groups
    current_model_state     current_model_state.<name>      a dict of spread tensors, e.g. of an averaging callback
    anything else           meta.pt; a spread tensor nested in it becomes {MARK: <number>}, and is stored as
                            spread.<number>

Loading returns such a dict, with lazily read tensors (:func:`stored_tensor`), so that user hooks may drop, rename and
change them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.sources import MARK, SPREAD, Readable, put, stored_tensor, with_spread
from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage.full_file import read_full
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, with_aliases
from smp_strategy.checkpoint.storage.path_kind import CHECKPOINTS, kind_of, unreadable
from smp_strategy.checkpoint.storage.reader import CheckpointReader, is_sharded
from smp_strategy.checkpoint.storage.remote_path import RemotePath, any_path
from smp_strategy.checkpoint.storage.torch_load import allowing_plain_values
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.errors import CheckpointError

__all__ = [
    "described_elsewhere",
    "is_path",
    "named_in",
    "read_checkpoint",
    "recover_folder",
    "split_checkpoint",
    "with_all_names",
]

_MODULE, _OPTIMIZERS = "state_dict", "optimizer_states"


class Directory(Readable, Protocol):
    """An opened sharded checkpoint."""

    @property
    def paths(self) -> Mapping[str, tuple[Any, ...]]:
        """The keys of each entry in nested dicts, or its name alone."""


def read_checkpoint(
    path: Any, plain: Callable[..., Any], *, weights_only: bool, is_ours: bool, verifies: bool
) -> dict[str, Any]:
    """Read a checkpoint of either form. Collective. Tensors of a directory are read lazily, at their first use.

    Args:
        path: file, directory or address, the same on all ranks.
        plain: reads addresses, and other files unless they are ours (``is_ours``).
        weights_only: whether only tensors and plain values are allowed, so that no file can run code.
        verifies: whether this rank reads all of a file, for the others of its node.

    Raises:
        CheckpointError: it is damaged, or contains objects that are not allowed.
    """
    place = any_path(path)
    with allowing_plain_values():
        if is_sharded(place):
            directory = CheckpointReader.open(place)
            checkpoint = _join_checkpoint(directory, directory.rest(weights_only=weights_only))
        elif isinstance(place, RemotePath) or not is_ours:
            checkpoint = plain(path, weights_only=weights_only)
        else:
            _refuse_foreign_folder(place)
            content = _read_by_all(place, weights_only, verifies=verifies)
            checkpoint = _collect_optimizers(dict(content)) if isinstance(content, Mapping) else content
    _refuse_foreign_content(checkpoint, path)
    return checkpoint


def _read_by_all(path: Path, weights_only: bool, *, verifies: bool) -> Any:
    """The content of a file, verified by a single rank per node that reads all of it. Collective.

    Raises:
        CheckpointError: on all ranks; the file is missing, damaged, or cannot be loaded without running code.
    """
    content, problem = None, None
    try:
        if verifies:
            content = read_full(path, weights_only=weights_only)
    except Exception as error:
        problem = error
    problems: list[tuple[str, str] | None] = []
    if dist.is_initialized():
        mine = problem if problem is None else (type(problem).__name__, str(problem))
        problems = collectives.gather_objects(mine, f"the verification of {path}")
    if problem is not None:
        raise problem
    for kind, text in filter(None, problems):
        raise CheckpointError(f"{path} cannot be loaded, as another rank has found: {kind}: {text}")
    if content is None:
        content = read_full(path, weights_only=weights_only, verify=False)
    return content


def split_checkpoint(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split into the state that all ranks store and the rest for global rank 0; ``checkpoint`` is not changed."""
    rest = dict(checkpoint)
    state: dict[str, Any] = {_MODULE: with_aliases(_all_held(rest.pop(_MODULE)))}
    for number, optimizer in enumerate(rest.pop(_OPTIMIZERS, ())):
        state[f"optimizer_{number}"] = _all_held(optimizer)
    for key, value in list(rest.items()):
        if _is_spread_dict(value):
            state[key] = with_aliases(_all_held(rest.pop(key)))
    found: dict[str, HeldTensor] = {}

    def mark(leaf: Any) -> Any:
        if not isinstance(leaf, HeldTensor):
            return leaf
        found[str(len(found))] = leaf
        return {MARK: str(len(found) - 1)}

    rest = pytree.tree_map(mark, rest, is_leaf=_is_held)
    return {**state, SPREAD: found} if found else state, rest


def _join_checkpoint(stored: Directory, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`split_checkpoint`, with lazily read tensors; ``rest`` is the content of ``meta.pt``."""
    parts: dict[Any, Any] = {}
    values: dict[str, Any] = {name: stored_tensor(stored, name) for name in stored.tensors}
    values.update(stored.read_objects(stored.objects))
    for name, value in values.items():
        put(parts, _way_of(name) if len(stored.paths[name]) == 1 else stored.paths[name], value)
    whole = with_spread(rest, parts)
    return _collect_optimizers({**whole, **parts})


def recover_folder(folder: Any) -> None:
    """Put back checkpoints in ``folder``, a path or an address, that an interrupted save has moved aside."""
    commit.recover_all(any_path(folder))


def is_path(place: Any) -> bool:
    """Whether ``place`` is a path on a disk, and no address."""
    return isinstance(any_path(place), Path)


def named_in(folder: str, name: str, suffix: str) -> set[str]:
    """Addresses in ``folder``, an address, that begin with ``name`` and have this ``suffix``."""
    place = any_path(folder)
    there = place.iterdir() if place.exists() else ()
    return {str(each) for each in there if each.name.startswith(name) and each.suffix == suffix}


def _refuse_foreign_folder(path: Path) -> None:
    """Refuse a folder that ranks have not written together.

    Raises:
        CheckpointError: ``path`` is such a folder.
    """
    if not path.is_dir():
        return
    kind = kind_of(path)
    if kind in CHECKPOINTS:
        problem = f"It is a {kind.value}. `smp import` makes one of it."
    else:
        problem = "Give a file or a folder that `trainer.save_checkpoint` or ModelCheckpoint has written."
    reason = unreadable(path, kind) or f"{path} is a folder, but no checkpoint of Lightning's. {problem}"
    raise CheckpointError(reason)


def _refuse_foreign_content(content: Any, path: Any) -> None:
    """Refuse the content of a file that is no checkpoint of Lightning.

    Raises:
        CheckpointError: it has no weights where Lightning keeps them.
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} has an object of the class {type(content).__name__} instead of a dict, so it is none of "
            "Lightning's checkpoints. Give a file that `trainer.save_checkpoint` or ModelCheckpoint has written."
        )
    if "state_dict" not in content:
        raise CheckpointError(
            f"{path} has no `state_dict`, so it is none of Lightning's checkpoints (there are "
            f"{', '.join(map(repr, content)) or 'no entries'}). `smp import` makes one of it."
        )
    if not isinstance(content["state_dict"], Mapping):
        raise CheckpointError(
            f"`state_dict` in {path} is no dict of weights by their names, but an object of the class "
            f"{type(content['state_dict']).__name__}. Give a file that `trainer.save_checkpoint` has written."
        )


def _collect_optimizers(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Collect ``optimizer_<n>`` entries, as converted directories have them, into the list of optimizer states."""
    numbers = sorted(int(key.rpartition("_")[2]) for key in checkpoint if _is_optimizer(key))
    if numbers and _OPTIMIZERS not in checkpoint:
        states = [checkpoint.pop(f"optimizer_{number}") for number in numbers]
        checkpoint[_OPTIMIZERS] = [{"state": {}, **state} for state in states]
    return checkpoint


def _is_held(node: Any) -> bool:
    return isinstance(node, HeldTensor)


def _is_optimizer(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("optimizer_") and key.removeprefix("optimizer_").isdecimal()


def _is_spread_dict(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return False
    leaves = value.values()
    return any(map(_is_held, leaves)) and all(isinstance(leaf, HeldTensor | Tensor) for leaf in leaves)


def _all_held(tree: Any) -> Any:
    """The tensors that this rank stores. An ordinary tensor is replicated, so each rank has all of it."""
    if isinstance(tree, Mapping):
        held = {key: _all_held(value) for key, value in tree.items()}
        return {key: value for key, value in held.items() if not isinstance(value, HeldTensor) or value.blocks}
    return HeldTensor.whole(tree.detach()) if isinstance(tree, Tensor) else tree


def _way_of(name: str) -> tuple[str, ...]:
    """The keys of an entry whose writer has stored a flat ``name`` only."""
    part, _, inside = name.partition(".")
    if _is_optimizer(part) and inside.startswith("state."):
        parameter, _, key = inside.removeprefix("state.").rpartition(".")
        return part, "state", parameter, key
    return (part, inside) if inside else (name,)


def described_elsewhere(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` of global rank 0, with meta tensors on the other ranks. Collective.

    So user hooks that drop or rename entries find them on all ranks.
    """

    def described(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf

    found = collectives.tell(pytree.tree_map(described, dict(state)), 0, "the entries of a checkpoint")
    return state or found


def with_all_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's tensors, plus name, shape and dtype of all others. Collective.

    A tensor with several names is one object under all of them.
    """
    mine = {
        name: (each.shape, each.dtype, each.aliases) for name, each in state.items() if isinstance(each, HeldTensor)
    }
    everyones = collectives.gather_objects(mine, "the names of a checkpoint's tensors")
    whole: dict[str, Any] = {}
    for name, value in state.items():
        whole.update(dict.fromkeys((name, *(value.aliases if isinstance(value, HeldTensor) else ())), value))
    for described in everyones:
        for name, (shape, dtype, aliases) in described.items():
            if name not in whole:
                whole.update(
                    dict.fromkeys((name, *aliases), HeldTensor(shape=shape, dtype=dtype, blocks=(), aliases=aliases))
                )
    return whole
