"""Side effects of a call on containers among its arguments, turned into results.

A unit gets rebuilt arguments: with fake tensors in a prediction, with real ones in a run. A list that it appends to
(``aux_losses.append(loss)``) is therefore not the caller's list. So new contents of the containers among its arguments
become part of its result, and are put into the caller's containers afterwards, on every stage. Additions to containers
in context variables are treated alike.

Other objects (a key/value cache) are passed to units as they are. The dry run of a step lends them to units, to see
which tensors are put there and which unit takes them, and restores their contents.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, NamedTuple, final

import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.model.trace.context_containers import additions, collectors, put_into_collectors
from smp_strategy.model.trace.opened_objects import is_value
from smp_strategy.model.trace.prediction import IMMUTABLE
from smp_strategy.model.trace.snapshot import contents_of, fill, is_dataclass, is_same, replaced
from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["Changed", "apply_changes", "contents_of_objects", "is_object", "put_back", "watched"]

# Tested first, because most arguments are of these types.
_LEAVES = (Tensor, NoneType, int, float, str)


@final
@dataclasses.dataclass(frozen=True)
class _Given:
    """Placeholder of a container among the arguments."""

    number: int


class Changed(NamedTuple):
    """Result of a call that changed containers among its arguments or in context variables."""

    result: Any
    contents: dict[int, Any]
    """New contents of the changed ones, by their number among all containers."""
    added: dict[Any, Any]
    """Additions to collectors, see :mod:`smp_strategy.model.trace.context_containers`."""


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` to return a :class:`Changed` if it changes containers.

    These are lists, dicts and dataclasses among its arguments, and collectors that it adds to.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        given = _containers_of((args, kwargs))
        if not given and not collectors():
            return function(*args, **kwargs)
        before = [contents_of(container) for container in given]
        with additions() as added:
            result = function(*args, **kwargs)
        after = [contents_of(container) for container in given]
        changed = {number: now for number, now in enumerate(after) if not is_same(now, before[number])}
        if not changed and not added:
            return result
        numbers = {id(container): _Given(number) for number, container in enumerate(given)}
        by_number = {n: replaced(now, lambda item: numbers.get(id(item), item)) for n, now in changed.items()}
        return Changed(result, by_number, added)

    return call


def apply_changes(changed: Changed, arguments: tuple[Any, Any]) -> Any:
    """Give the caller's containers, among ``arguments`` and in context variables, their new contents.

    Returns:
        The bare result.
    """
    given = _containers_of(arguments)
    for number, contents in changed.contents.items():
        fill(given[number], replaced(contents, lambda item: given[item.number] if isinstance(item, _Given) else item))
    put_into_collectors(changed.added)
    return changed.result


_WITHOUT_STATE = (TensorSpec, Tensor, *IMMUTABLE, slice, nn.Module, type, dist.ProcessGroup, dist.ReduceOp)


def is_object(leaf: Any) -> bool:
    """Whether an argument has a state of its own (a cache, say) and is no tensor and no module."""
    return not isinstance(leaf, _WITHOUT_STATE) and not callable(leaf)


def contents_of_objects(leaves: Iterable[Any]) -> list[tuple[Any, Any]]:
    """All containers below the objects among ``leaves``, with their present contents."""
    found: dict[int, tuple[Any, Any]] = {}

    def visit(item: Any) -> None:
        if id(item) in found or isinstance(item, Tensor | nn.Module | type):
            return
        inner = item
        if hasattr(item, "__dict__") and not callable(item):
            inner = vars(item)
        if isinstance(inner, list | dict):
            found[id(item)] = (inner, contents_of(inner))
        if isinstance(inner, list | dict | tuple):
            for child in inner.values() if isinstance(inner, dict) else inner:
                visit(child)

    for leaf in leaves:
        if is_object(leaf):
            visit(leaf)
    return list(found.values())


def put_back(before: Sequence[tuple[Any, Any]]) -> None:
    """Restore the contents from :func:`contents_of_objects`."""
    for container, contents in before:
        fill(container, contents)


def _containers_of(arguments: tuple[Any, Any]) -> list[Any]:
    """All containers among the positional and the keyword arguments of a call."""
    args, kwargs = arguments
    return list(_containers((*args, *kwargs.values())))


def _containers(tree: Any) -> Iterator[Any]:
    """All lists, dicts and dataclasses in a nest, from the outside in."""
    if isinstance(tree, _LEAVES):
        return
    if isinstance(tree, (list, dict)) or is_dataclass(tree):
        yield tree
    items = tree if isinstance(tree, (list, tuple)) else []
    if isinstance(tree, dict):
        items = list(tree.values())
    elif is_dataclass(tree):
        items = list(contents_of(tree).values())
    elif is_value(type(tree)) and isinstance(getattr(tree, "__dict__", None), dict):  # a namespace, a `UserDict`
        items = [vars(tree)]
    for item in items:
        yield from _containers(item)
