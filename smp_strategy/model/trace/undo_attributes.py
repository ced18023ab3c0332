"""Undo what code does to the Python attributes of modules.

A dry run executes the user's code, which may count calls, keep a tensor for later or fill a cache. None of it may
outlive the dry run: a cache filled with fake tensors would break the real run that follows. What lists, dicts and sets
in attributes hold counts, however deep they stand in each other; other objects do not.
"""

import collections
import copy
import itertools
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["attributes_restored", "containers_in", "refill", "tensors_restored"]

_CONTAINERS = (list, dict, set, collections.deque)
_ORDINARY = frozenset({*_CONTAINERS, collections.OrderedDict, collections.defaultdict})

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def attributes_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards attributes of ``modules``, and the lists, dicts and sets in them, hold what they held before."""
    before = [(vars(module), dict(vars(module))) for module in modules]
    contents = [
        (container, copy.copy(container))
        for _, attributes in before
        for container in containers_in(attributes.values())
    ]
    try:
        yield
    finally:
        for held, attributes in before:
            for name in held.keys() - attributes.keys():
                del held[name]
            held.update(attributes)
        for container, inside in contents:
            refill(container, inside)


@contextmanager
def tensors_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards tensors in attributes of ``modules`` that are no buffers have the values that they had before."""
    found: dict[int, Tensor] = {}
    for attributes in map(vars, modules):
        values = [value for name, value in attributes.items() if name not in _OF_EVERY_MODULE]
        inside = [each.values() if isinstance(each, dict) else each for each in containers_in(values)]
        # No subclasses: fake ones, and those that stand for tensors elsewhere. And none that cannot be changed.
        found |= {id(each): each for each in itertools.chain(values, *inside) if type(each) is Tensor}
    changeable = [each for each in found.values() if not (each.requires_grad or each.is_inference())]
    before = [(each, each._version, each.clone()) for each in changeable]
    try:
        yield
    finally:
        for tensor, version, value in before:
            if tensor._version != version:
                tensor.copy_(value)


def containers_in(values: Iterable[Any]) -> list[Any]:
    """The lists, dicts and sets among ``values`` and in them, each once."""
    found: dict[int, Any] = {}

    def visit(nests: Iterable[Any]) -> None:
        for nest in nests:
            if id(nest) not in found:
                found[id(nest)] = nest
                inside = nest.values() if isinstance(nest, dict) else nest
                # Others may refuse to be filled. Asked of all at once: there may be a million numbers.
                if not _ORDINARY.isdisjoint(map(type, inside)):
                    visit([each for each in inside if type(each) in _ORDINARY])

    visit([value for value in values if isinstance(value, (*_CONTAINERS, tuple))])
    return [item for item in found.values() if not isinstance(item, tuple)]


def refill(container: Any, contents: Any) -> None:
    """Give a list, deque, mapping or set other contents."""
    container.clear()
    if isinstance(container, MutableMapping | set):
        container.update(contents)
    else:
        container.extend(contents)
