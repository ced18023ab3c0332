"""Undo what code does to the Python attributes of modules.

A dry run executes the user's code, which may count calls, keep a tensor for later or fill a cache. None of it may
outlive the dry run: a cache filled with fake tensors would break the real run that follows.
"""

import collections
import copy
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["attributes_restored", "refill"]

_CONTAINERS = (list, dict, set, collections.deque)


@contextmanager
def attributes_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards attributes of ``modules``, and the lists, dicts and sets in them, hold what they held before."""
    before = [(vars(module), _contents(vars(module))) for module in modules]
    try:
        yield
    finally:
        for attributes, contents in before:
            _restore(attributes, contents)


def _contents(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and a copy of it where it is a container that can change."""
    return {
        name: (value, copy.copy(value) if isinstance(value, _CONTAINERS) else None)
        for name, value in attributes.items()
    }


def _restore(attributes: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    for name, (value, contents) in before.items():
        attributes[name] = value
        if contents is not None:
            refill(value, contents)


def refill(container: Any, contents: Any) -> None:
    """Give a list, deque, mapping or set other contents."""
    container.clear()
    if isinstance(container, MutableMapping | set):
        container.update(contents)
    else:
        container.extend(contents)
