"""Nests of containers, with dataclasses among the containers.

What a unit takes and returns may be any nest of tuples, lists, dicts, named tuples and dataclasses. PyTorch's pytree
knows all of them except dataclasses, which it wants registered one by one.

Arguments of a call are flattened hundreds of times per step, and nearly always hold no container at all. So a flat
call has a short form, which takes pytree, being general, much longer. A dry run looks at the arguments of every single
operation, several times: these hold tuples and lists at most.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["flatten", "flatten_call", "given_to", "leaves_of", "unflatten_call"]


# Asked for first, because most arguments are of these.
_PLAIN = frozenset({Tensor, type(None), bool, int, float, str})


class FlatCall(NamedTuple):
    """The structure of a call whose arguments are all leaves."""

    num_positional: int
    names: tuple[str, ...]


_flat_call = functools.lru_cache(maxsize=1024)(FlatCall)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """The leaves of ``tree`` and how to put them together again; a dataclass is registered when it is first met.

    Args:
        tree: any nest.
        is_leaf: what else is not taken apart.
    """
    leaves, structure = pytree.tree_flatten(tree, is_leaf)
    unknown = [kind for kind in {type(leaf) for leaf in leaves} if hasattr(kind, "__dataclass_fields__")]
    known = False
    for kind in unknown:
        if all(field.init for field in dataclasses.fields(kind)):
            pytree.register_dataclass(kind)
            known = True
    return flatten(tree, is_leaf) if known else (leaves, structure)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a call's arguments and their structure, for :func:`unflatten_call`."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        kind = type(leaf)
        if not (kind in _PLAIN or isinstance(leaf, Tensor) or _is_leaf(kind)):  # type: ignore[arg-type]
            return flatten((args, kwargs))
    return leaves, _flat_call(len(args), tuple(kwargs))


def given_to(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of an operation: of a deep copy the tensor, but not the notes of what is half copied already."""
    return args[:1] if function is Tensor.__deepcopy__ else (args, kwargs)


def leaves_of(tree: Any) -> list[Any]:
    """What ``pytree.tree_leaves`` returns, sooner where ``tree`` is of plain tuples, lists and dicts."""
    kind = type(tree)
    if kind is not tuple and kind is not list and kind is not dict:
        return [tree] if _is_leaf(kind) else pytree.tree_leaves(tree)  # type: ignore[arg-type]
    found: list[Any] = []
    for each in tree.values() if kind is dict else tree:
        if type(each) in _PLAIN or isinstance(each, Tensor):
            found.append(each)
        else:
            found += leaves_of(each)
    return found


def unflatten_call(leaves: Iterable[Any], structure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` again, with other leaves."""
    if isinstance(structure, FlatCall):
        leaves = tuple(leaves)
        given = structure.num_positional
        return leaves[:given], dict(zip(structure.names, leaves[given:], strict=True))
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


@functools.lru_cache(maxsize=1024)
def _is_leaf(kind: type) -> bool:
    """Whether objects of this kind hold nothing that pytree would open."""
    if kind in pytree.SUPPORTED_NODES or hasattr(kind, "__dataclass_fields__"):
        return False
    return not issubclass(kind, tuple) or not hasattr(kind, "_fields")
