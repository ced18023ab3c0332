"""Collectors: lists and dicts in context variables that units add to.

Hugging Face models collect attention maps and router logits this way: a context variable holds a dict of lists while
the model runs, and hooks on parts of its blocks append to them. Only the stage that runs a block has its additions, and
the other stages need them, too.

A call may append to such a list and set keys of such a dict, and of lists and dicts in it. Its additions are taken out
again and become part of its result (:mod:`smp_strategy.model.trace.side_effects`).
"""

import contextvars
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.snapshot import fill

__all__ = ["additions", "collector_key", "collectors", "put_into_collectors"]

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
