"""Layout of a sharded Lightning checkpoint: split the checkpoint dict into stored tensors and ``meta.pt``, and back.

Lightning, its callbacks and the user build one dict. Tensors that are spread over ranks (:class:`HeldTensor`) are
stored by their ranks, under the names that Lightning's own directories use. Global rank 0 writes everything else,
unchanged, to ``meta.pt``::

    state_dict              state_dict.<name>
    optimizer_states[0]     optimizer_0.state.<name>.<key>, optimizer_0.param_groups
    current_model_state     current_model_state.<name>      a dict of spread tensors, e.g. of an averaging callback
    anything else           meta.pt; a spread tensor nested in it becomes {MARK: <number>}, and is stored as
                            spread.<number>

Loading returns such a dict, with lazily read tensors (:func:`stored_tensor`), so that user hooks may drop, rename and
change them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.sources import MARK, SPREAD, Readable, put, stored_tensor, with_spread
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, with_aliases
from smp_strategy.checkpoint.storage.path_kind import CHECKPOINTS, kind_of, unreadable
from smp_strategy.checkpoint.storage.remote_path import RemotePath
from smp_strategy.errors import CheckpointError

__all__ = [
    "Directory",
    "collect_optimizers",
    "join_checkpoint",
    "last_checkpoints",
    "refuse_foreign_content",
    "refuse_foreign_folder",
    "split_checkpoint",
]

_MODULE, _OPTIMIZERS = "state_dict", "optimizer_states"


class Directory(Readable, Protocol):
    """An opened sharded checkpoint."""

    @property
    def paths(self) -> Mapping[str, tuple[Any, ...]]:
        """The keys of each entry in nested dicts, or its name alone."""


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


def join_checkpoint(stored: Directory, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`split_checkpoint`, with lazily read tensors.

    Args:
        stored: the tensors and objects of the ranks.
        rest: the content of ``meta.pt``.
    """
    parts: dict[Any, Any] = {}
    values: dict[str, Any] = {name: stored_tensor(stored, name) for name in stored.tensors}
    values.update(stored.read_objects(stored.objects))
    for name, value in values.items():
        put(parts, _way_of(name) if len(stored.paths[name]) == 1 else stored.paths[name], value)
    whole = with_spread(rest, parts)
    return collect_optimizers({**whole, **parts})


def last_checkpoints(folder: RemotePath, callback: Any, trainer: Any) -> set[str]:
    """Addresses of the last checkpoints of a ModelCheckpoint in ``folder``; its ``_find_last_checkpoints``.

    Args:
        folder: the ``dirpath`` of the callback, an address.
        callback: of the Trainer.
        trainer: unused; Lightning gives it.
    """
    name, suffix = callback.CHECKPOINT_NAME_LAST, callback.FILE_EXTENSION
    there = folder.iterdir() if folder.exists() else ()
    return {str(each) for each in there if each.name.startswith(name) and each.suffix == suffix}


def refuse_foreign_folder(path: Path) -> None:
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


def refuse_foreign_content(content: Any, path: Any) -> None:
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


def collect_optimizers(checkpoint: dict[str, Any]) -> dict[str, Any]:
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
