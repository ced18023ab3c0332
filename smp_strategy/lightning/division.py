"""What of a Lightning checkpoint goes to which part of a directory, and how it becomes one dict again.

Lightning, its callbacks and the user put together one dict. Tensors that are spread over ranks (:class:`Held`) are
stored by the ranks that have them, under the names that Lightning's own directories use; everything else is
``meta.pt``, which global rank 0 writes as it is::

    state_dict              state_dict.<name>
    optimizer_states[0]     optimizer_0.state.<name>.<key>, optimizer_0.param_groups
    current_model_state     current_model_state.<name>      a dict of spread tensors: from a callback that averages
    anything else           meta.pt; in the place of a spread tensor deep inside of it stands {MARK: <number>},
                            and the tensor is spread.<number>

What is loaded is such a dict again, in which tensors are read when they are used (:class:`UnreadTensor`), so that hooks
of the user may drop, rename and change them. Then each rank reads its share of what is left, straight to its place.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.whole import WholeState, flattened
from smp_strategy.storage.held import Held
from smp_strategy.storage.source import Source
from smp_strategy.storage.unread import UnreadTensor

__all__ = ["Directory", "Edited", "divided", "put_together", "snapshot"]

_MODULE, _OPTIMIZERS, _SPREAD = "state_dict", "optimizer_states", "spread"
_MARK: Final = "smp_strategy/spread"


class Directory(Source, Protocol):
    """An opened checkpoint of many files."""

    def read(self, name: str) -> Tensor:
        """A whole tensor."""

    def rest(self) -> dict[str, Any]:
        """What is in ``meta.pt``."""


def divided(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state for the ranks to store together, and the rest for one to write; ``checkpoint`` stays as it is."""
    rest = dict(checkpoint)
    state: dict[str, Any] = {_MODULE: _with_aliases(_all_held(rest.pop(_MODULE)))}
    for number, optimizer in enumerate(rest.pop(_OPTIMIZERS, ())):
        state[f"optimizer_{number}"] = _all_held(optimizer)
    for key, value in list(rest.items()):
        if _is_spread_dict(value):
            state[key] = _with_aliases(_all_held(rest.pop(key)))
    found: dict[str, Held] = {}

    def mark(leaf: Any) -> Any:
        if not isinstance(leaf, Held):
            return leaf
        found[str(len(found))] = leaf
        return {_MARK: str(len(found) - 1)}

    rest = pytree.tree_map(mark, rest, is_leaf=_is_held)
    return {**state, _SPREAD: found} if found else state, rest


def put_together(stored: Directory) -> dict[str, Any]:
    """The checkpoint that was :func:`divided`, with tensors that are read when they are used."""
    entries: dict[str, Any] = {
        name: UnreadTensor.of(name, described, stored.read) for name, described in stored.tensors.items()
    }
    entries.update(stored.read_objects(stored.objects))
    parts: dict[str, Any] = {}
    for name, value in entries.items():
        part, dot, inside = name.partition(".")
        if dot:
            parts.setdefault(part, {})[inside] = value
        else:  # of other writers
            parts[name] = value
    spread = parts.pop(_SPREAD, {})
    whole: dict[str, Any] = pytree.tree_map(
        lambda node: spread[node[_MARK]] if _is_mark(node) else node, stored.rest(), is_leaf=_is_mark
    )
    optimizers = sorted(filter(_is_optimizer, parts), key=lambda key: int(key.rpartition("_")[2]))
    if optimizers:
        whole[_OPTIMIZERS] = [_optimizer_state(parts.pop(key)) for key in optimizers]
    return {**whole, **parts}


class Edited:
    """A part of a checkpoint that was :func:`put_together`, as it is after hooks have seen it, as a source.

    What nobody has touched is read from the directory by those that need it, and by them alone.

    Args:
        part: the state dict of the module, say.
        stored: what unread tensors belong to.
        name: of the part.
    """

    def __init__(self, part: Mapping[str, Any], stored: Source, name: str) -> None:
        self._entries = flattened(part, f"{name}.")
        self._touched = WholeState(self._entries)
        self._stored = stored

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors."""
        return self._touched.tensors

    @property
    def objects(self) -> list[str]:
        """The names of everything else."""
        return self._touched.objects

    def fill(self, wanted: Mapping[str, Held]) -> None:
        """See :class:`~smp_strategy.storage.source.Source`."""
        unread: dict[str, Held] = {}
        touched: dict[str, Held] = {}
        for name, held in wanted.items():
            tensor = self._entries.get(name)
            is_first = isinstance(tensor, UnreadTensor) and not tensor.is_read and tensor.stored_as not in unread
            if is_first:
                unread[tensor.stored_as] = held
            else:
                touched[name] = held
        self._stored.fill(unread)
        self._touched.fill(touched)

    def read_objects(self, names: Any) -> dict[str, Any]:
        """Objects by their names."""
        return self._touched.read_objects(names)


def snapshot(tree: Any, is_fresh: Callable[[Tensor], bool] = lambda tensor: False) -> Any:
    """A copy in host memory, which stays as it is while training goes on.

    Args:
        tree: what is to be saved. Tensors that are the same memory, as tied weights are, stay that.
        is_fresh: whether a tensor is such a copy already.
    """
    memo: dict[int, Any] = {}
    copies: dict[Any, Tensor] = {}
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            key = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
            if key not in copies:
                copies[key] = leaf if is_fresh(leaf) else leaf.detach().to("cpu", copy=True)
            memo[id(leaf)] = copies[key]
    return copy.deepcopy(tree, memo)


def _is_held(node: Any) -> bool:
    return isinstance(node, Held)


def _is_mark(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {_MARK}


def _is_optimizer(key: str) -> bool:
    return key.startswith("optimizer_") and key.removeprefix("optimizer_").isdecimal()


def _is_spread_dict(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return False
    leaves = value.values()
    return any(map(_is_held, leaves)) and all(isinstance(leaf, Held | Tensor) for leaf in leaves)


def _all_held(tree: Any) -> Any:
    """An ordinary tensor is the same on all ranks, so that each of them has all of it."""
    if isinstance(tree, Mapping):
        return {key: _all_held(value) for key, value in tree.items()}
    return Held.whole(tree.detach()) if isinstance(tree, Tensor) else tree


def _with_aliases(state: Mapping[str, Any]) -> dict[str, Any]:
    """Names that hooks have seen each by itself, of one tensor, as a name and its aliases."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, Held):
            names.setdefault(id(value), []).append(name)
    found: dict[str, Any] = {}
    for name, value in state.items():
        first, *others = names.get(id(value), [name])
        if first == name:
            is_told = not isinstance(value, Held) or value.aliases == tuple(others)
            found[name] = value if is_told else Held(
                shape=value.shape, dtype=value.dtype, blocks=value.blocks, aliases=tuple(others)
            )
    return found


def _optimizer_state(part: Mapping[str, Any]) -> dict[str, Any]:
    """By names of parameters, as those that the groups name."""
    groups = part.get("param_groups", [])
    known = {name for group in groups for name in group.get("params", ())}
    state: dict[str, Any] = {}
    for key, value in part.items():
        prefix, _, inside = key.partition(".")
        if prefix == "state":
            parameter = _longest_beginning(inside, known)
            state.setdefault(parameter, {})[inside.removeprefix(f"{parameter}.")] = value
    return {"state": state, "param_groups": groups}


def _longest_beginning(name: str, known: Collection[str]) -> str:
    beginning = name
    while beginning := beginning.rpartition(".")[0]:
        if beginning in known:
            return beginning
    return name.rpartition(".")[0]
