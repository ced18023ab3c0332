"""Undo what code does to objects: meters, states, plain namespaces that modules and variables hold.

Of objects of the user's classes all attributes are put back. Of those of libraries only numbers are, which they count
by: an object that they have made meanwhile (a connection, a file) stays, because they would make another one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from smp_strategy.trace.libraries import is_own_object

__all__ = ["objects_restored"]

# Further inside of each other than that objects are not looked for.
_MOST_LEVELS = 4
# Longer containers are data.
_MOST_ENTRIES = 10_000
_MOST_BYTES = 1 << 26


@contextmanager
def objects_restored(values: Iterable[Any]) -> Iterator[None]:
    """Afterwards objects and arrays among ``values``, and in them, hold what they held before."""
    objects: dict[int, Any] = {}
    arrays: dict[int, Any] = {}
    _look_for(values, objects, arrays, _MOST_LEVELS)
    before = [(each, _attributes(each)) for each in objects.values()]
    contents = [(each, each.copy()) for each in arrays.values()]
    try:
        yield
    finally:
        for each, attributes in before:
            if is_own_object(each):
                for name in vars(each).keys() - attributes.keys():
                    del vars(each)[name]
            vars(each).update(attributes)
        for array, content in contents:
            array[...] = content


def _look_for(values: Iterable[Any], objects: dict[int, Any], arrays: dict[int, Any], levels: int) -> None:
    for value in values:
        if id(value) in objects or id(value) in arrays:
            continue
        if isinstance(value, np.ndarray):
            if value.flags.writeable and value.nbytes <= _MOST_BYTES:
                arrays[id(value)] = value
        elif isinstance(value, (dict, list, tuple)) and levels:
            inside = value.values() if isinstance(value, dict) else value
            if len(value) <= _MOST_ENTRIES:
                _look_for(list(inside), objects, arrays, levels - 1)
        elif is_own_object(value):
            objects[id(value)] = value
            if levels:
                _look_for(list(vars(value).values()), objects, arrays, levels - 1)
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (nn.Module, Tensor, type)):
            objects[id(value)] = value


def _attributes(value: Any) -> dict[str, Any]:
    if is_own_object(value):
        return dict(vars(value))
    return {name: held for name, held in vars(value).items() if type(held) in (int, float)}
