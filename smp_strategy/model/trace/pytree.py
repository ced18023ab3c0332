"""Pytrees with dataclasses, and short paths for flat calls.

Arguments and results of a unit may be any nest of tuples, lists, dicts, named tuples and dataclasses. PyTorch's pytree
supports all of them except dataclasses, which must be registered one by one.

Arguments of a call are flattened hundreds of times per step, and nearly always contain no container, so flat calls have
a short form that avoids the general, much slower pytree. A dry run inspects the arguments of every single operation
several times: these contain tuples and lists at most.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.model.trace.opened_objects import (
    flatten_opened,
    is_opened_argument,
    is_opened_result,
    is_opened_value,
    is_value,
)

__all__ = ["flatten", "flatten_output", "flatten_result", "flatten_call", "given_to", "leaves_of", "unflatten_call"]


# Tested first, because most arguments are of these types.
_PLAIN = frozenset({Tensor, type(None), bool, int, float, str})


class FlatCall(NamedTuple):
    """Structure of a call whose arguments are all leaves."""

    num_positional: int
    names: tuple[str, ...]


_flat_call = functools.lru_cache(maxsize=1024)(FlatCall)


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, opens: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Any]:
    """Flatten ``tree`` into leaves and a pytree spec; dataclasses are registered on first sight.

    Args:
        tree: Any nest.
        is_leaf: Tells which further nodes are leaves.
        opens: Tells which objects are opened; by default mappings, distributions and similar with placed tensors.
    """
    leaves, structure = pytree.tree_flatten(tree, is_leaf)
    unknown = [kind for kind in {type(leaf) for leaf in leaves} if hasattr(kind, "__dataclass_fields__")]
    known = False
    for kind in unknown:
        if all(field.init for field in dataclasses.fields(kind)):
            pytree.register_dataclass(kind)
            known = True
    if known:
        return flatten(tree, is_leaf, opens)
    if all(type(leaf) in _PLAIN or isinstance(leaf, Tensor) for leaf in leaves):
        return leaves, structure
    return flatten_opened(tree, opens or is_opened_argument, is_leaf) or (leaves, structure)


def flatten_result(result: Any, inputs: Iterable[Any] = ()) -> tuple[list[Any], Any]:
    """Flatten what a unit returns, with all objects opened that hold tensors and are none of its ``inputs``."""
    if isinstance(result, Tensor):
        return flatten(result)
    given = {id(leaf) for leaf in inputs}
    return flatten(result, None, lambda value: id(value) not in given and is_opened_result(value))


def flatten_output(output: Any) -> tuple[list[Any], Any]:
    """Flatten what a whole model returns, with mappings, distributions and objects of the user's classes opened."""
    return flatten(output, None, is_opened_value)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Flatten the arguments of a call into leaves and a structure for :func:`unflatten_call`."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        kind = type(leaf)
        if not (kind in _PLAIN or isinstance(leaf, Tensor) or _is_leaf(kind)):  # type: ignore[arg-type]
            return flatten((args, kwargs))
    return leaves, _flat_call(len(args), tuple(kwargs))


def given_to(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments of an operation; of ``__deepcopy__`` only the tensor, not the memo of half-copied objects."""
    return args[:1] if function is Tensor.__deepcopy__ else (args, kwargs)


def leaves_of(tree: Any) -> list[Any]:
    """Like ``pytree.tree_leaves``, but faster for plain tuples, lists and dicts."""
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
    """Rebuild ``args`` and ``kwargs`` from leaves."""
    if isinstance(structure, FlatCall):
        leaves = tuple(leaves)
        given = structure.num_positional
        return leaves[:given], dict(zip(structure.names, leaves[given:], strict=True))
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


@functools.lru_cache(maxsize=1024)
def _is_leaf(kind: type) -> bool:
    """Whether pytree treats objects of this type as leaves."""
    return not (kind in pytree.SUPPORTED_NODES or hasattr(kind, "__dataclass_fields__") or is_value(kind))
