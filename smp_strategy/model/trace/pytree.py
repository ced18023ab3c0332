"""Pytrees with dataclasses, and short paths for flat calls.

Arguments and results of a unit may be any nest of tuples, lists, dicts, named tuples and dataclasses. PyTorch's pytree
supports all of them except dataclasses, which must be registered one by one. Where a search needs paths, or nodes that
are no leaves, or opens other objects, it walks by :func:`nodes`.

Arguments of a call are flattened hundreds of times per step, and nearly always contain no container, so flat calls have
a short form that avoids the general, much slower pytree. A dry run inspects the arguments of every single operation
several times: these contain tuples and lists at most.
"""

import collections
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils import _pytree as pytree

from smp_strategy.model.trace.user_code import is_own_object

__all__ = [
    "flatten",
    "flatten_output",
    "flatten_result",
    "flatten_call",
    "given_to",
    "leaves_of",
    "unflatten_call",
    "LeafSlot",
    "Path",
    "has_tensors",
    "items_of",
    "nodes",
    "is_opened_placed",
    "is_opened_value",
    "is_value",
    "without_validation",
]


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
    return _flatten_opened(tree, opens or _is_opened_argument, is_leaf) or (leaves, structure)


def flatten_result(result: Any, inputs: Iterable[Any] = ()) -> tuple[list[Any], Any]:
    """Flatten what a unit returns, with all objects opened that hold tensors and are none of its ``inputs``."""
    if isinstance(result, Tensor):
        return flatten(result)
    given = {id(leaf) for leaf in inputs}
    return flatten(result, None, lambda value: id(value) not in given and has_tensors(value))


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


Path: TypeAlias = tuple[Any, ...]
"""Keys that lead to a node."""


def items_of(node: Any) -> Iterable[tuple[Any, Any]]:
    """Items of a mapping, a list or a tuple with their keys; nothing of anything else."""
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, (list, tuple)) else ()


def nodes(
    tree: Any,
    opened: Callable[[Any], Iterable[tuple[Any, Any]]] = items_of,
    path: Path = (),
    levels: float = math.inf,
    once: dict[int, Any] | None = None,
) -> Iterator[tuple[Path, Any]]:
    """Yield each node of ``tree`` with its path, from the outside in.

    Args:
        tree: Any nest.
        opened: Gives the keys and items of a node.
        path: Path of ``tree``.
        levels: Longest path.
        once: Nodes by their ids, which are not yielded again. Added to, so that a nest may hold itself.
    """
    if once is not None:
        if id(tree) in once:
            return
        once[id(tree)] = tree
    yield path, tree
    for key, item in opened(tree) if len(path) < levels else ():
        yield from nodes(item, opened, (*path, key), levels, once)


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


# --- objects ---------------------------------------------------------------------------------------------------------
# Objects with tensors as nodes of a pytree: distributions, namespaces, mappings that are no dict, the user's own.
#
# PyTorch's pytree takes an object of a class that it does not know as one leaf, with everything inside. Stages exchange
# tensors, so a call's result must be taken apart down to them. An object is opened into the contents of the container
# that it extends, if any, and its attributes. It is put together again past its constructor and past its own
# `__setitem__`, which may refuse changes or check values.


_VALUES = (Mapping, dict, list, tuple, Distribution, types.SimpleNamespace)

_BASES = (collections.OrderedDict, collections.defaultdict, dict, list, tuple)
_CLOSED = (str, bytes, int, float, complex, type(None), type, nn.Module, types.ModuleType)
_MOST_LEVELS = 8
_MOST_ENTRIES = 10_000


class LeafSlot:
    """Placeholder of a leaf, with a device because packed sequences, which are named tuples, query it."""

    device = torch.device("cpu")


class _ObjectForm(NamedTuple):
    """Structure of an opened object."""

    kind: type
    base: type | None
    """Container that it extends."""
    factory: Any
    """That of a ``defaultdict``."""
    attributes: tuple[str, ...]


@final
class _Opened:
    """Node that takes the place of an object."""

    def __init__(self, value: Any) -> None:
        kind = type(value)
        base = next((each for each in _BASES if issubclass(kind, each)), None)
        attributes = _attributes_of(value)
        contents: list[Any] = []  # one list or dict, or nothing
        if kind is types.MappingProxyType:
            base, contents = kind, [dict(value)]
        elif base is not None:
            contents = [list(base.__iter__(value)) if base in (list, tuple) else dict(_items(base, value))]
        factory = getattr(value, "default_factory", None) if base is collections.defaultdict else None
        self.form = _ObjectForm(kind, base, factory, tuple(attributes))
        self.children = [*contents, *attributes.values()]


def _put_together(children: Iterable[Any], form: _ObjectForm) -> Any:
    kind, base, factory, names = form
    children = list(children)
    contents: Any = None if base is None else children.pop(0)
    if base is types.MappingProxyType:
        return types.MappingProxyType(contents)
    maker: Any = base or _maker(kind)
    value: Any = maker.__new__(kind, contents) if base is tuple else maker.__new__(kind)
    if base is list:
        list.extend(value, contents)
    elif isinstance(base, type) and issubclass(base, dict):
        if base is collections.defaultdict:
            collections.defaultdict.__init__(value, factory)
        for key, item in contents.items():
            base.__setitem__(value, key, item)
    slots = _slots_of(kind)
    for name, item in zip(names, children, strict=True):
        if name in slots:
            object.__setattr__(value, name, item)
        else:
            vars(value)[name] = item
    return value


pytree.register_pytree_node(_Opened, lambda node: (node.children, node.form), _put_together)


def _flatten_opened(
    tree: Any, opens: Callable[[Any], bool], is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Any] | None:
    """Flatten ``tree`` with the objects opened that ``opens`` accepts; ``None``: there are none.

    Args:
        tree: Any nest.
        opens: Whether to open an object, a leaf of PyTorch's pytree.
        is_leaf: Tells which further nodes are leaves.
    """
    leaves, structure = pytree.tree_flatten(tree, is_leaf)
    if not any(_may_hold(leaf) and opens(leaf) for leaf in leaves):
        return None

    def stays(node: Any) -> bool:  # a size would become a tuple
        return type(node) is torch.Size or (is_leaf is not None and is_leaf(node))

    def opened(value: Any) -> Any:
        if not (_may_hold(value) and opens(value)):
            return value
        node = _Opened(value)
        node.children = [pytree.tree_map(opened, child, is_leaf=stays) for child in node.children]
        return node

    return pytree.tree_flatten(pytree.tree_map(opened, tree, is_leaf=stays), stays)


def is_value(kind: type) -> bool:
    """Whether objects of a class stand for their contents: containers, distributions, namespaces."""
    return issubclass(kind, _VALUES)


@contextmanager
def without_validation() -> Iterator[None]:
    """Context of a dry run: distributions do not look at the values of their parameters, which there are none of."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _is_opened_argument(value: Any) -> bool:
    """Whether an object among the arguments of a call is opened: units cannot take placed tensors in objects."""
    return is_value(type(value)) and _holds(value, _is_placed)


def is_opened_value(value: Any) -> bool:
    """Whether an object in the result of a whole model is opened."""
    return (is_value(type(value)) or is_own_object(value)) and has_tensors(value)


def is_opened_placed(value: Any) -> bool:
    """Whether an object in the result of a step is opened."""
    return _holds(value, _is_placed)


def has_tensors(value: Any) -> bool:
    """Whether an object holds tensors, however deep, and can be opened: it does not hold itself."""
    return _holds(value, _is_tensor)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, LeafSlot))


def _is_placed(value: Any) -> bool:
    return getattr(type(value), "is_placed", False)


def _holds(value: Any, wanted: Callable[[Any], bool]) -> bool:
    return _may_hold(value) and _search(value, wanted, (), _MOST_LEVELS) is True


def _search(value: Any, wanted: Callable[[Any], bool], around: tuple[int, ...], levels: int) -> bool | None:
    """Whether there are wanted tensors below ``value``; ``None``: it holds itself."""
    if wanted(value):
        return True
    if id(value) in around:
        return None
    if levels == 0 or isinstance(value, (Tensor, *_CLOSED, torch.Size)) or (around and callable(value)):
        return False
    found = False
    for item in _inside(value):
        inner = _search(item, wanted, (*around, id(value)), levels - 1)
        if inner is None:
            return None
        found |= inner
    return found


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, types.MappingProxyType)):
        yield from value.values() if len(value) <= _MOST_ENTRIES else ()
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from value if len(value) <= _MOST_ENTRIES else ()
    if type(value) not in (dict, list, tuple):
        yield from _attributes_of(value).values()


def _may_hold(value: Any) -> bool:
    """Whether a leaf of PyTorch's pytree can be opened at all."""
    if isinstance(value, (Tensor, LeafSlot, *_CLOSED, torch.Size)):
        return False
    if type(value) is types.MappingProxyType:
        return True
    if isinstance(value, (dict, list, tuple)):
        return True
    kind = type(value)
    is_made_plainly = kind.__new__ is _maker(kind).__new__
    return is_made_plainly and (hasattr(value, "__dict__") or bool(_slots_of(kind))) and not callable(value)


def _maker(kind: type) -> type:
    return types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object


def _items(base: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    return ((key, base.__getitem__(value, key)) for key in base.__iter__(value))


def _attributes_of(value: Any) -> dict[str, Any]:
    slots = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
    return dict(sorted({**slots, **getattr(value, "__dict__", {})}.items()))


def _slots_of(kind: type) -> list[str]:
    found: list[str] = []
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        names = [names] if isinstance(names, str) else names
        found += [_mangled(each, name) for name in names if name not in ("__dict__", "__weakref__")]
    return found


def _mangled(kind: type, name: str) -> str:
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
