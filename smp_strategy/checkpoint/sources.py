"""Sources in memory: a full state dict, or a loaded one that the user's hooks may have edited.

A loaded state passes through the user's hooks, which look at names and shapes, drop or rename entries, and sometimes
use values. So a folder is offered like an ordinary file, as a dict of tensors, which are deferred
(:mod:`smp_strategy.model.deferred_tensor`). Each rank reads its shards of those that nobody has changed straight to
their place, whatever their names are by now. Values of the others are computed, or taken from memory.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, Source
from smp_strategy.errors import CheckpointError
from smp_strategy.model.deferred_tensor import DeferredTensor, defer

__all__ = [
    "EditedState",
    "WholeState",
    "flattened",
    "Readable",
    "put",
    "stored_tensor",
    "with_spread",
    "MARK",
    "SPREAD",
]

SPREAD: Final = "spread"
"""Key of tensors of ranks that are nested in the rest of a checkpoint, by their numbers."""
MARK: Final = "smp_strategy/spread"
"""Key of the placeholder of such a tensor in the rest: ``{MARK: <number>}``."""


class WholeState:
    """:class:`~smp_strategy.checkpoint.storage.held_tensor.Source` of full tensors in memory, or mapped from a file.

    Args:
        entries: Tensors and other objects, by their names; see :func:`flattened`.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._entries.items() if isinstance(value, Tensor)}

    @property
    def objects(self) -> list[str]:
        """Names of everything else."""
        return [name for name, value in self._entries.items() if not isinstance(value, Tensor)]

    def fill(self, wanted: Mapping[str, HeldTensor]) -> None:
        """Copy values to this rank's rectangles, which may be of another dtype or on another device."""
        for name, held in wanted.items():
            whole = self._entries.get(name)
            if not isinstance(whole, Tensor) or tuple(whole.shape) != tuple(held.shape):
                found = f"a tensor of shape {list(whole.shape)}" if isinstance(whole, Tensor) else repr(type(whole))
                raise CheckpointError(f"`{name}` should be a tensor of shape {list(held.shape)}, but is {found}.")
            for block in held.blocks:
                block.tensor.copy_(block.rectangle.view_of(whole.detach()))

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        return {name: self._entries[name] for name in names}


def flattened(
    state: Mapping[str, Any], prefix: str = "", opens: Callable[[str, Mapping[str, Any]], bool] | None = None
) -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys.

    Args:
        state: The dicts.
        prefix: Comes before each key.
        opens: Tells, by the key and the dict, which are flattened; by default all are.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping) and (opens is None or opens(f"{prefix}{key}", value)):
            found.update(flattened(value, f"{prefix}{key}.", opens))
        elif isinstance(value, HeldTensor) and value.aliases:
            found[f"{prefix}{key}"] = replace(value, aliases=tuple(prefix + alias for alias in value.aliases))
        else:
            found[f"{prefix}{key}"] = value
    return found


@final
class EditedState(WholeState):
    """:class:`~smp_strategy.checkpoint.storage.held_tensor.Source` of a loaded state after the user's hooks."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__(flattened(state))

    def fill(self, wanted: Mapping[str, HeldTensor]) -> None:
        """Copy values to this rank's rectangles; unread tensors are read from their own source."""
        unread: dict[Readable, dict[str, HeldTensor]] = {}
        others: dict[str, HeldTensor] = {}
        for name, held in wanted.items():
            tensor = self._entries.get(name)
            values = tensor.origin if isinstance(tensor, DeferredTensor) else None
            if isinstance(values, StoredValues):
                of_source = unread.setdefault(values.source, {})
                if values.name not in of_source:
                    of_source[values.name] = held
                    continue
            others[name] = held
        for source, of_source in unread.items():
            source.fill(of_source)
        super().fill(others)


class Readable(Source, Protocol):
    """Source that can read whole tensors."""

    def read(self, name: str) -> Tensor:
        """A tensor in its own host memory."""


@final
@dataclass(frozen=True, eq=False)
class StoredValues:
    """Values of a tensor in a checkpoint, to be read when they are needed."""

    source: Readable
    name: str
    """Name of the tensor in ``source``."""

    def __call__(self) -> Tensor:
        return self.source.read(self.name)


def stored_tensor(source: Readable, name: str) -> DeferredTensor:
    """The tensor named ``name`` in ``source``; its first use but ``copy_`` from it reads the values, and keeps them."""
    described = source.tensors[name]
    like = torch.empty(described.shape, dtype=described.dtype, device="meta")
    return defer(like, torch.device("cpu"), StoredValues(source, name), keeps=True)


def put(tree: dict[Any, Any], way: Sequence[Any], value: Any) -> None:
    """Put an entry into nested dicts, under the keys ``way``."""
    *outer, last = way
    for key in outer:
        tree = tree.setdefault(key, {})
    tree[last] = value


def with_spread(rest: Mapping[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """``rest`` with the tensors of :data:`SPREAD`, which are taken out of ``tree``, in the place of their marks."""
    if not any(map(_is_mark, pytree.tree_leaves(dict(rest), is_leaf=_is_mark))):
        return dict(rest)
    spread = tree.pop(SPREAD, {})
    found: dict[str, Any] = pytree.tree_map(
        lambda node: spread[node[MARK]] if _is_mark(node) else node, dict(rest), is_leaf=_is_mark
    )
    return found


def _is_mark(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {MARK}
