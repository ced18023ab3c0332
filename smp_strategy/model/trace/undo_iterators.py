"""Iterators that modules and variables hold give the items of a dry run once more.

``next(self.batches)`` cannot be undone. So a dry run gets a :class:`Rewindable` in the place of the iterator, which
keeps the items that it gives. Afterwards these come again, before the rest.
"""

import io
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, final

__all__ = ["Rewindable", "iterators_rewound"]


@final
class Rewindable(Iterator[Any]):
    """An iterator that can give again what it has given. In all else it is the iterator that it stands for.

    Args:
        iterator: that is.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._ahead: deque[Any] = deque()
        self._given: list[Any] | None = None
        self.is_needed = False
        """Whether anything has ever been given again."""

    def __next__(self) -> Any:
        item = self._ahead.popleft() if self._ahead else next(self._iterator)
        if self._given is not None:
            self._given.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_iterator"], name)

    def begin(self) -> None:
        """From now on what is given is to come again."""
        self._given = []

    def rewind(self) -> Iterator[Any]:
        """It comes again from now on; returns what stands for the iterator."""
        given, self._given = self._given or [], None
        self._ahead.extendleft(reversed(given))
        self.is_needed |= bool(given)
        return self if self.is_needed else self._iterator


@contextmanager
def iterators_rewound(holders: Iterable[MutableMapping[str, Any]]) -> Iterator[None]:
    """What is drawn in here from iterators that stand in ``holders`` under any name is drawn again afterwards."""
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
