"""Undo what code does to objects that modules and variables hold: meters, namespaces, arrays, random generators.

Objects of the user's classes get back all of their attributes, and the contents of lists, dicts and sets in these.
Objects of libraries get back their numbers only. Other things that a library has made meanwhile (a connection, a file)
stay, because it would make them once more.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smp_strategy.model.trace.undo_attributes import containers_in, refill
from smp_strategy.model.trace.user_code import is_own_object

__all__ = ["objects_restored"]

# Further inside of each other than that objects are not looked for.
_MOST_LEVELS = 4
# Longer containers are data.
_MOST_ENTRIES = 10_000
_MOST_BYTES = 1 << 26


@contextmanager
def objects_restored(values: Iterable[Any]) -> Iterator[None]:
    """Afterwards objects, arrays and generators among ``values``, and in them, hold what they held before."""
    objects: dict[int, Any] = {}
    others: dict[int, Callable[[], object]] = {}
    _look_for(values, objects, others, _MOST_LEVELS)
    before = [(each, _attributes(each)) for each in objects.values()]
    held = [value for each, attributes in before if is_own_object(each) for value in attributes.values()]
    contents = [(each, copy.copy(each)) for each in containers_in(held)]
    try:
        yield
    finally:
        for container, inside in contents:
            refill(container, inside)
        for each, attributes in before:
            if is_own_object(each):
                for name in vars(each).keys() - attributes.keys():
                    del vars(each)[name]
            vars(each).update(attributes)
        for put_back in others.values():
            put_back()


def _look_for(
    values: Iterable[Any], objects: dict[int, Any], others: dict[int, Callable[[], object]], levels: int
) -> None:
    for value in values:
        if id(value) in objects or id(value) in others:
            continue
        put_back = _put_back(value)
        if put_back is not None:
            others[id(value)] = put_back
        elif isinstance(value, (dict, list, tuple)) and levels:
            inside = value.values() if isinstance(value, dict) else value
            if len(value) <= _MOST_ENTRIES:
                _look_for(list(inside), objects, others, levels - 1)
        elif is_own_object(value):
            objects[id(value)] = value
            if levels:
                _look_for(list(vars(value).values()), objects, others, levels - 1)
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (nn.Module, Tensor, type)):
            objects[id(value)] = value


def _attributes(value: Any) -> dict[str, Any]:
    if is_own_object(value):
        return dict(vars(value))
    return {name: held for name, held in vars(value).items() if type(held) in (int, float)}


def _put_back(value: Any) -> Callable[[], object] | None:
    """Lets an array or a generator of random numbers be what it is now."""
    if isinstance(value, np.ndarray) and value.flags.writeable and value.nbytes <= _MOST_BYTES:
        return partial(np.copyto, value, value.copy())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    return None
