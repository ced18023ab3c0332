"""Calls that follow each other and are computed again together.

A call that is given what the call before it has returned need not keep it: when backward comes, the earlier call is run
first, and what both would have kept is there at once. So a group of N calls keeps the inputs of its first one only, for
the price that all N are in memory while backward goes through them.

Calls follow each other if their units stand in the same list of modules and a tensor that the later one is given is, as
an object and unchanged, one that the earlier one has returned, in the same microbatch. A value that comes from another
stage, or from code above the units, is another object: a group never crosses stages, and ends where anything is done
between its units.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from smp_strategy.activations.checkpoint import Recomputed

__all__ = ["CheckpointGroups", "Joined"]


class Joined(NamedTuple):
    """How a call follows another."""

    earlier: Recomputed | None
    made: dict[int, int]
    """Positions of arguments that the earlier call has made, with their positions among its results."""
    size: int
    """Number of calls in the group, this one included."""


class _Latest(NamedTuple):
    call: weakref.ref[Recomputed]
    results: list[tuple[int, weakref.ref[Tensor], int]]
    """Positions, tensors, versions."""
    size: int


@final
class CheckpointGroups:
    """Those of a stage. Nothing here keeps a call or a tensor alive."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, object], _Latest] = {}

    def join(self, unit: str, token: object, leaves: Sequence[Any], most: int | None) -> Joined:
        """Which call a new one follows, if it follows one.

        Args:
            unit: name of what is called.
            token: equal for calls of one microbatch.
            leaves: its arguments.
            most: calls in a group; ``None``: any number.
        """
        latest = self._latest.get((_list_of(unit), token))
        earlier = None if latest is None else latest.call()
        if latest is None or earlier is None or (most is not None and latest.size >= most):
            return Joined(None, {}, 1)
        made = {}
        for number, reference, version in latest.results:
            tensor = reference()
            if tensor is not None and tensor._version == version:
                made.update({at: number for at, leaf in enumerate(leaves) if leaf is tensor})
        return Joined(earlier, made, latest.size + 1) if made else Joined(None, {}, 1)

    def note(self, unit: str, token: object, call: Recomputed, results: Sequence[Any], size: int) -> None:
        """``call`` has returned ``results``."""
        tensors = [(at, leaf) for at, leaf in enumerate(results) if isinstance(leaf, Tensor)]
        references = [(at, weakref.ref(leaf), leaf._version) for at, leaf in tensors]
        self._latest[_list_of(unit), token] = _Latest(weakref.ref(call), references, size)


def _list_of(unit: str) -> str:
    return unit.rpartition(".")[0]
