"""Pieces of a sharded unit's parameters, as an optimizer sees them, in the middle of a pass."""

from collections.abc import Iterator
from contextlib import contextmanager

from smp_strategy.data_parallel.flat_unit import FlatUnit

__all__ = ["pieces_shown"]


@contextmanager
def pieces_shown(unit: FlatUnit) -> Iterator[None]:
    """Every parameter and gradient is this rank's piece of it; what happens to them stays."""
    unit.end_gradients()
    unit.show_pieces()
    yield
    unit.hide_pieces()
    unit.begin_gradients()
