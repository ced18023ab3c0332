"""Rewind iterators in attributes and variables after a dry run.

``next(self.batches)`` cannot be undone. So during a dry run a :class:`Rewindable` replaces the iterator and records its
items. Afterwards it yields these first, then the rest.
"""

import io
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, final

__all__ = ["Rewindable", "iterators_rewound"]


@final
class Rewindable(Iterator[Any]):
    """Iterator that can be rewound; all other attributes are those of the wrapped iterator.

    Args:
        iterator: Iterator to wrap.
    """

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
