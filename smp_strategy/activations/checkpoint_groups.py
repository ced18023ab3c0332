"""Checkpoint groups: consecutive calls that are recomputed together. See [Note: recomputation slots].

A call need not keep an input that the call before it has returned: in backward the earlier call is recomputed first,
and the tensors that both would have kept are available at once. So a group of N calls keeps only the inputs of its
first call, and has the activations of all N in memory during their backward.

Two calls belong together if their units are in the same list of modules, they belong to the same microbatch, and a
tensor that the later one gets is, as an object and unchanged, one that the earlier one has returned. A value from
another stage, or from code above the units, is another object: a group never crosses stages, and ends where anything
happens between its units.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from smp_strategy.activations.checkpoint import Recomputed

__all__ = ["CheckpointGroups", "Joined"]


class Joined(NamedTuple):
    """Membership of a call in a checkpoint group."""

    earlier: Recomputed | None
    made: dict[int, int]
    """Positions of arguments that the earlier call has returned, with their positions among its results."""
    size: int
    """Number of calls in the group, including this one."""


class _Latest(NamedTuple):
    call: weakref.ref[Recomputed]
    results: list[tuple[int, weakref.ref[Tensor], int]]
    """Positions, tensors, versions."""
    size: int


@final
class CheckpointGroups:
    """Checkpoint groups of a stage. Holds no call and no tensor alive."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, object], _Latest] = {}

    def join(self, unit: str, token: object, leaves: Sequence[Any], most: int | None) -> Joined:
        """The call that a new call follows, if any.

        Args:
            unit: Name of the called unit.
            token: Equal for calls of one microbatch.
            leaves: Flattened arguments.
            most: Maximum number of calls in a group; ``None``: no limit.
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
        """Record that ``call`` has returned ``results``."""
        tensors = [(at, leaf) for at, leaf in enumerate(results) if isinstance(leaf, Tensor)]
        references = [(at, weakref.ref(leaf), leaf._version) for at, leaf in tensors]
        self._latest[_list_of(unit), token] = _Latest(weakref.ref(call), references, size)


def _list_of(unit: str) -> str:
    return unit.rpartition(".")[0]
