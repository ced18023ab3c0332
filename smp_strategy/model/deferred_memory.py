"""Memory of deferred tensors: values that are computed when needed, noted changes, and views.

See [Note: deferred operations] in :mod:`smp_strategy.model.deferred_tensor`.
"""

import weakref
from collections.abc import Callable
from typing import final

from torch import Tensor

__all__ = ["DeferredMemory", "DeferredView", "Known", "ReadRun"]

# Values with at most this many elements are cached, since Python reads them again and again.
_MOST_CACHED = 1024
# Values that are needed more often are cached as well: those of a model that computes and is never partitioned.
_MOST_USES = 3


@final
class DeferredMemory:
    """Memory of a deferred tensor and its views: computed when needed, or kept for good.

    Args:
        compute: Computes the values, in new memory.
        run: Computes a run of them, if the memory is row-major.
        origin: What reads the values, if they are not computed.
        keeps: Whether the first use keeps the values, and results of operations are ordinary tensors.

    Attributes:
        keeps: As given.
        kept: Values that are kept for good; ``None``: they are computed when needed.
        is_changed: Whether values that are kept are no longer those that ``compute`` gives.
        history: Noted changes, as text.
    """

    def __init__(
        self,
        compute: "Callable[[Known], Tensor]",
        run: "ReadRun | None" = None,
        origin: Callable[[], Tensor] | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self._compute = compute
        self._run = run
        self._origin = origin
        self.keeps = keeps
        self.kept: Tensor | None = None
        self.is_changed = False
        self.history: list[str] = []
        self._cached: Tensor | None = None
        self._num_uses = 0
        self._changes: list[Callable[[Tensor], object]] = []
        # What noted operations read.
        self._readers: list[weakref.ref[DeferredView]] = []

    def value(self, known: "Known") -> Tensor:
        """The values: those that are kept, cached or ``known``, or new ones."""
        found = self._cached if self.kept is None else self.kept
        if found is not None:
            return found
        if self not in known:
            value = self._compute(known)
            for change in self._changes:
                change(value)
            known[self] = value
            self._num_uses += 1
            if self._num_uses > _MOST_USES or value.numel() <= _MOST_CACHED:
                self._cached = value
        return known[self]

    @property
    def origin(self) -> Callable[[], Tensor] | None:
        """Reader of these very values; ``None``: they are computed, changed, or have been handed out for good."""
        return self._origin if self.kept is None and not self._changes else None

    @property
    def is_new(self) -> bool:
        """Whether the next :meth:`value` is in memory that nothing else has."""
        return self.kept is None and self._cached is None

    @property
    def run(self) -> "ReadRun | None":
        """Reads a run of the elements alone; ``None``: all must be read, or are kept."""
        return self._run if self.kept is None and not self._changes else None

    def keep(self) -> None:
        """Keep the values for good."""
        if self.kept is None:
            self.kept, self._cached = self.value({}), None

    def read_through(self, view: "DeferredView") -> "DeferredView":
        """Source of an operation that is noted now: the values of ``view``, even if the memory changes."""
        read = DeferredView(self, view.views, view.offset)
        self._readers.append(weakref.ref(read))
        return read

    def change_at_once(self, replaced: Tensor | None) -> None:
        """The values are about to be changed in place; all of them are, if there is memory for them: ``replaced``."""
        self._part_from_readers()
        if self.kept is None and replaced is not None:
            self.kept = replaced
        self.keep()
        self.is_changed = True

    def change_later(self, change: Callable[[Tensor], object], text: str) -> None:
        """Let ``change``, of which ``text`` tells all, change the values when they are computed; they are not kept."""
        self._part_from_readers()
        self._cached = None
        self._changes.append(change)
        self.history.append(text)

    def _part_from_readers(self) -> None:
        """Leave the values until now to a base of their own if something reads them."""
        readers = [node for reference in self._readers if (node := reference()) is not None]
        self._readers = []
        if not readers:
            return
        older = DeferredMemory(self._compute, self._run)
        older._changes, older._readers = self._changes, [weakref.ref(node) for node in readers]
        older.kept = None if self.kept is None else self.kept.clone()
        for node in readers:
            node.base = older
        self._compute, self._run, self._changes = lambda known: older.value(known).clone(), None, []


# Values that one evaluation has found already; several operations may read the same base.
Known = dict[DeferredMemory, Tensor]
Views = tuple[Callable[[Tensor], Tensor], ...]
# Reads the elements from the first number to the second, in row-major order, into new memory of one dim.
ReadRun = Callable[[int, int], Tensor]


@final
class DeferredView:
    """Values of a deferred tensor: those of a base, or a view of them that begins at ``offset``, if that is known."""

    def __init__(self, base: DeferredMemory, views: Views = (), offset: int | None = 0) -> None:
        self.base = base
        self.views = views
        self.offset = offset

    def value(self, known: Known) -> Tensor:
        """The values, which share memory with those of the base."""
        found = self.base.value(known)
        for view in self.views:
            found = view(found)
        return found
