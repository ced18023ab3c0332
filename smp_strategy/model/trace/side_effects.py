"""Side effects of a call on containers among its arguments, turned into results.

A unit gets rebuilt arguments: with fake tensors in a prediction, with real ones in a run. A list that it appends to
(``aux_losses.append(loss)``) is therefore not the caller's list. So new contents of the containers among its arguments
become part of its result, and are put into the caller's containers afterwards, on every stage. Additions to containers
in context variables are treated alike.

Other objects (a key/value cache) are passed to units as they are. The dry run of a step lends them to units, to see
which tensors are put there and which unit takes them, and restores their contents.

Collectors: lists and dicts in context variables that units add to.

Hugging Face models collect attention maps and router logits this way: a context variable holds a dict of lists while
the model runs, and hooks on parts of its blocks append to them. Only the stage that runs a block has its additions, and
the other stages need them, too.

A call may append to such a list and set keys of such a dict, and of lists and dicts in it. Its additions are taken out
again and become part of its result.
"""

import contextvars
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import Any, NamedTuple, final

import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import IMMUTABLE
from smp_strategy.model.trace.pytree import is_value, items_of, nodes
from smp_strategy.model.trace.snapshot import contents_of, fill, is_dataclass, is_same, replaced
from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = [
    "Changed",
    "apply_changes",
    "containers_of_objects",
    "is_object",
    "objects_in",
    "watched",
    "additions",
    "collector_key",
    "collectors",
    "put_into_collectors",
]


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
    """Additions to collectors."""


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


def objects_in(leaves: Iterable[Any]) -> list[tuple[Any, Any]]:
    """All containers below the objects among ``leaves``, each once: the list, dict or object, and what holds its items.

    Of an object the latter is its ``__dict__``. The order is that of a search from the outside in.
    """
    seen: dict[int, Any] = {}
    items = (item for leaf in leaves if is_object(leaf) for _, item in nodes(leaf, _opened_object, once=seen))
    return [(item, inner) for item in items if isinstance(inner := _inner(item), list | dict)]


def _inner(item: Any) -> Any:
    """What holds the items of a container or an object, if it has any."""
    if isinstance(item, Tensor | nn.Module | type):
        return None
    return vars(item) if hasattr(item, "__dict__") and not callable(item) else item


def _opened_object(item: Any) -> Iterable[tuple[Any, Any]]:
    inner = _inner(item)
    return items_of(inner) if isinstance(inner, list | dict | tuple) else ()


def containers_of_objects(leaves: Iterable[Any]) -> list[Any]:
    """What holds the items of :func:`objects_in`."""
    return [inner for _, inner in objects_in(leaves)]


def _containers_of(arguments: tuple[Any, Any]) -> list[Any]:
    """All containers among the positional and the keyword arguments of a call."""
    args, kwargs = arguments
    given = [each for each in (*args, *kwargs.values()) if not isinstance(each, _LEAVES)]
    found = (node for each in given for _, node in nodes(each, _opened))
    return [node for node in found if isinstance(node, (list, dict)) or is_dataclass(node)]


def _opened(node: Any) -> Iterable[tuple[Any, Any]]:
    """Items of lists, tuples, dicts, dataclasses and namespaces."""
    if isinstance(node, _LEAVES):
        return ()
    if isinstance(node, (list, dict, tuple)):
        return items_of(node)
    if is_dataclass(node):
        return items_of(contents_of(node))
    if is_value(type(node)) and isinstance(getattr(node, "__dict__", None), dict):  # a namespace, a `UserDict`
        return ((None, vars(node)),)
    return ()


Path = tuple[Any, ...]
"""Name of a context variable; for a container in its dict, also the key there."""

_MISSING = object()
_KINDS = (list, dict)


def collectors() -> list[tuple[Path, Any]]:
    """All lists and dicts in context variables with their paths; ranks agree on the order of different paths."""
    found: list[tuple[Path, Any]] = []
    held = [item for item in contextvars.copy_context().items() if type(item[1]) in _KINDS]
    for variable, value in sorted(held, key=lambda item: item[0].name):
        inside = value.items() if isinstance(value, dict) else ()
        found.append(((variable.name,), value))
        found += [((variable.name, key), item) for key, item in inside if type(item) in _KINDS]
    return found


def collector_key() -> tuple[Any, ...]:
    """Part of a prediction's cache key: the present collectors, and whether they are empty.

    Computed at every call of a unit, so it neither sorts nor looks into empty ones.
    """
    found: tuple[Any, ...] = ()
    for variable, value in contextvars.copy_context().items():
        kind = type(value)
        if kind is dict or kind is list:
            found += (variable, _outline(value)) if value else (variable,)
    return found


def _outline(container: Any) -> Any:
    if isinstance(container, dict):
        return tuple((key, bool(item)) if type(item) in _KINDS else key for key, item in container.items())
    return len(container) > 0


@contextmanager
def additions() -> Iterator[dict[Path, Any]]:
    """Yield the additions to collectors in here, by path; afterwards the collectors are restored.

    Raises:
        UnsupportedError: An item is removed from one, or its path is ambiguous.
    """
    before = [(path, container, container.copy()) for path, container in collectors()]
    added: dict[Path, Any] = {}
    try:
        yield added
        for path, container, contents in before:
            new = _added(path, container, contents)
            if new and [other for other, *_ in before].count(path) > 1:
                raise UnsupportedError(
                    f"A unit adds to what the context variable `{path[0]}` holds, but there are several of this name. "
                    "Give them different names: stages know them by these."
                )
            if new:
                added[path] = new
    finally:
        for _, container, contents in before:
            fill(container, contents)


def put_into_collectors(added: Mapping[Path, Any]) -> None:
    """Add the result of :func:`additions`, from this or another stage."""
    present = dict(collectors())
    for path, new in added.items():
        if isinstance(new, dict):
            present[path].update(new)
        else:
            present[path].extend(new)


def _added(path: Path, container: Any, contents: Any) -> Any:
    """Items of ``container`` that were not among its former ``contents``."""
    if isinstance(container, dict):
        is_kept = container.keys() >= contents.keys()
        new: Any = {key: item for key, item in container.items() if contents.get(key, _MISSING) is not item}
    else:
        is_kept = len(container) >= len(contents) and all(map(operator.is_, container, contents))
        new = container[len(contents) :]
    if not is_kept:
        raise UnsupportedError(
            f"A unit removes items of the {type(container).__name__} that the context variable `{path[0]}` holds, but "
            "other stages have what it held before. Let units add to it only, and code above the units remove."
        )
    return new
