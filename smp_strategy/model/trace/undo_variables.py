"""Undo what a dry run does to variables, iterators and caches of the user's code.

Variables (a list at the top of a script, a count in a notebook) get back what they held.

Rewind iterators in attributes and variables after a dry run.

``next(self.batches)`` cannot be undone. So during a dry run a :class:`Rewindable` replaces the iterator and records its
items. Afterwards it yields these first, then the rest.

Functions under ``functools.lru_cache`` (tables of positions, masks): dry runs leave no fake tensors in their caches.

Nothing can be taken out of such a cache, and it does not tell what it holds. But the garbage collector knows what an
object refers to. A cache that has got a fake tensor is emptied: its function computes the others again, too.

The garbage collector does not tell which objects are frozen (``gc.freeze``, which processes call before they fork). So
the modules are searched as well where some are.
"""

import functools
import gc
import io
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from smp_strategy.model.trace.places import variables_of
from smp_strategy.model.trace.snapshot import containers_in

__all__ = [
    "variables_restored",
    "iterators_rewound",
    "MemoizedFunctions",
    "hide_fakes",
]


@contextmanager
def variables_restored(modules: Iterable[nn.Module], step: Callable[..., Any] | None = None) -> Iterator[None]:
    """Restore afterwards the variables that code of ``modules`` and ``step`` names."""
    found = variables_of(modules, step)
    with iterators_rewound(found.holders()), found.snapshot():
        yield


@final
class Rewindable(Iterator[Any]):
    """Iterator that can be rewound; all other attributes are those of the wrapped iterator."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._ahead: deque[Any] = deque()
        self._given: list[Any] | None = None
        self.is_needed = False
        """Whether it has ever been rewound with items."""

    def __next__(self) -> Any:
        item = self._ahead.popleft() if self._ahead else next(self._iterator)
        if self._given is not None:
            self._given.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_iterator"], name)

    def begin(self) -> None:
        """Start to record items."""
        self._given = []

    def rewind(self) -> Iterator[Any]:
        """Yield the recorded items again; returns this object, or the bare iterator if nothing was ever recorded."""
        given, self._given = self._given or [], None
        self._ahead.extendleft(reversed(given))
        self.is_needed |= bool(given)
        return self if self.is_needed else self._iterator


@contextmanager
def iterators_rewound(holders: Iterable[MutableMapping[str, Any]]) -> Iterator[None]:
    """Rewind afterwards all iterators that are values in ``holders``."""
    places = [(holder, name, held) for holder in holders for name, held in list(holder.items()) if _is_iterator(held)]
    instead = {id(held): held if isinstance(held, Rewindable) else Rewindable(held) for _, _, held in places}
    for each in instead.values():
        each.begin()
    for holder, name, held in places:
        holder[name] = instead[id(held)]
    try:
        yield
    finally:
        after = {key: each.rewind() for key, each in instead.items()}
        for holder, name, held in places:
            holder[name] = after[id(held)]


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


_Memoized = functools._lru_cache_wrapper
_MOST_LEVELS = 4
# Symbolic sizes are computed with hundreds of large caches, of expressions only.
_OF_SYMBOLS = ("sympy.", "mpmath.")


@final
class MemoizedFunctions:
    """The memoized functions of this process."""

    def __init__(self) -> None:
        # With the number of results that each had computed after the last dry run.
        self._found: list[tuple[_Memoized[Any], int]] | None = None

    def look(self) -> None:
        """Find those that exist by now, at the next use; it takes a while."""
        self._found = None

    @contextmanager
    def without_fakes(self) -> Iterator[None]:
        """Context of a dry run: afterwards no cache holds fake tensors of it."""
        if self._found is None:
            self._found = [(each, each.cache_info().misses) for each in _memoized_functions()]
        try:
            yield
        finally:
            self._found = [(each, _emptied_of_fakes(each, misses)) for each, misses in self._found]


def _memoized_functions() -> list["_Memoized[Any]"]:
    found = [each for each in gc.get_referrers(_Memoized) if type(each) is _Memoized]
    if gc.get_freeze_count():
        found += [each for module in list(sys.modules.values()) for each in _defined_in(module)]
    return [each for each in dict.fromkeys(found) if not (each.__module__ or "").startswith(_OF_SYMBOLS)]


@functools.cache
def _defined_in(module: ModuleType) -> tuple["_Memoized[Any]", ...]:
    """Functions of a module, and methods of its classes. Later ones are not frozen."""
    values = list(getattr(module, "__dict__", {}).values())
    seen = set[int]()
    for each in values:
        # Not `isinstance`: it asks an object, and some import more, or warn, when they are asked.
        is_new_class = issubclass(type(each), type) and id(each) not in seen
        if is_new_class and vars(each).get("__module__") == module.__name__:
            seen.add(id(each))
            values += vars(each).values()  # also of the classes inside this one
    inside = [each.__func__ if type(each) in (staticmethod, classmethod) else each for each in values]
    return tuple(each for each in inside if type(each) is _Memoized)


def _emptied_of_fakes(memoized: "_Memoized[Any]", misses: int) -> int:
    """Empty the cache if it holds fake tensors, which it does not if it has computed only ``misses`` results."""
    now = memoized.cache_info().misses
    if now == misses or not _holds_fakes(gc.get_referents(memoized), _MOST_LEVELS):
        return now
    memoized.cache_clear()
    return 0


def hide_fakes(values: Iterable[Any]) -> None:
    """Take the fake tensors out of the dicts among and in ``values``, caches of dry runs that will be restored."""
    for container in containers_in(values):
        if isinstance(container, dict):
            for key in [key for key, value in container.items() if _holds_fakes([value], 1)]:
                del container[key]


def _holds_fakes(values: list[Any], levels: int) -> bool:
    if any(isinstance(value, FakeTensor | torch.SymInt) for value in values):
        return True
    inside = [
        value for value in values if type(value) in (dict, list, tuple) or type(value).__name__ == "_lru_list_elem"
    ]
    return levels > 0 and any(_holds_fakes(gc.get_referents(value), levels - 1) for value in inside)
