"""What a call changes beside the tensors that it is given: lists, dicts, attributes.

A unit gets its arguments rebuilt: with fake tensors where it is predicted, with real ones where it runs. A list that it
appends to (``aux_losses.append(loss)``) is therefore another list than the caller's. So what a unit leaves in the
containers among its arguments is taken for a part of what it returns, and put into the caller's containers afterwards,
on every stage.

A dry run must change nothing at all. It may set attributes (a table that is kept for the next call, a counter) and
write to objects (a key/value cache), which are put back.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

__all__ = ["apply", "attributes_put_back", "contents_of_object", "put_back", "watched"]


@final
@dataclasses.dataclass(frozen=True)
class _Given:
    """Stands for a container among the arguments."""

    number: int


def watched(function: Callable[..., Any]) -> Callable[..., tuple[Any, dict[int, Any]]]:
    """``function``, returning also the new contents of those containers among its arguments that it changed."""

    def call(*args: Any, **kwargs: Any) -> tuple[Any, dict[int, Any]]:
        given = list(_containers((args, kwargs)))
        before = [_contents(container) for container in given]
        result = function(*args, **kwargs)
        after = [_contents(container) for container in given]
        changed = {i: now for i, now in enumerate(after) if not _is_same(now, before[i])}
        numbers = {id(container): _Given(number) for number, container in enumerate(given)}
        return result, {i: _replaced(now, lambda item: numbers.get(id(item), item)) for i, now in changed.items()}

    return call


def apply(changes: Mapping[int, Any], arguments: Any) -> None:
    """Give the containers among ``arguments`` the contents that a watched call reported."""
    if not changes:
        return
    given = list(_containers(arguments))
    for number, contents in changes.items():
        _fill(given[number], _replaced(contents, lambda item: given[item.number] if isinstance(item, _Given) else item))


def contents_of_object(value: object) -> list[tuple[Any, Any]]:
    """Every container below an object that is none itself (a cache), with its present contents."""
    found: dict[int, tuple[Any, Any]] = {}

    def visit(item: Any) -> None:
        if id(item) in found or isinstance(item, Tensor | nn.Module | type):
            return
        inner = item
        if hasattr(item, "__dict__") and not callable(item):
            inner = vars(item)
        if isinstance(inner, list | dict):
            found[id(item)] = (inner, _contents(inner))
        if isinstance(inner, list | dict | tuple):
            for child in inner.values() if isinstance(inner, dict) else inner:
                visit(child)

    visit(value)
    return list(found.values())


def put_back(before: Sequence[tuple[Any, Any]]) -> None:
    """Give containers the contents that they had."""
    for container, contents in before:
        if not _is_same(_contents(container), contents):
            _fill(container, contents)


@contextmanager
def attributes_put_back(module: nn.Module, *, leave: Callable[[Any], bool] = lambda value: False) -> Iterator[None]:
    """Undo what happens to attributes of ``module`` and its parts, and to the lists and dicts in these attributes.

    Args:
        module: the module.
        leave: new values of attributes that are to stay.
    """
    kinds = (list, dict, set, collections.deque)
    before = [
        (vars(part), {k: (v, copy.copy(v) if isinstance(v, kinds) else None) for k, v in vars(part).items()})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for attributes, values in before:
            staying = {name: value for name, value in attributes.items() if leave(value)}
            _restore(attributes, values)
            attributes.update(staying)


def _restore(attributes: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    for name, (value, contents) in before.items():
        attributes[name] = value
        if contents is not None and not _is_same(_contents(value), _contents(contents)):
            _fill(value, contents)


def _containers(tree: Any) -> Iterator[Any]:
    """All lists, dicts and dataclasses in a nest, from the outside in."""
    if isinstance(tree, list | dict) or _is_dataclass(tree):
        yield tree
    items = tree if isinstance(tree, list | tuple) else []
    if isinstance(tree, dict):
        items = list(tree.values())
    elif _is_dataclass(tree):
        items = list(_contents(tree).values())
    for item in items:
        yield from _containers(item)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _contents(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    if _is_dataclass(container):
        return {field.name: getattr(container, field.name) for field in dataclasses.fields(container)}
    return list(container)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _replaced(contents: Any, by: Callable[[Any], Any]) -> Any:
    if isinstance(contents, dict):
        return {key: by(item) for key, item in contents.items()}
    return [by(item) for item in contents]


def _fill(container: Any, contents: Any) -> None:
    if isinstance(container, dict):
        container.clear()
        container.update(contents)
    elif _is_dataclass(container):
        for name, value in contents.items():
            setattr(container, name, value)
    elif isinstance(container, set):
        container.clear()
        container.update(contents)
    else:
        container.clear()
        container.extend(contents)
