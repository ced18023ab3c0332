"""Carried objects: a unit changes them, and the glue gives them to it again (a cache of keys and values, a memory).

Each stage has what its own units have put into such an object. Code above the units that asks the object, for the
length of a cache to make a mask, gets the answer of its own stage, and an empty cache has another length than a full
one. So from the call on in which a unit gets an object for the second time in a microbatch, the stages note the
arguments of units, and compare them with their programs at the end of the step (:mod:`.step_end`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from smp_strategy.distributed.agreement.topics import CARRIED_REASON
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.model.trace.side_effects import is_object
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["CarriedObjects"]


@final
@dataclass
class _UnitArguments:
    """Arguments of units in a microbatch."""

    objects: dict[tuple[object, int], Any] = field(default_factory=dict)
    """Objects by unit and identity; they are kept alive, so that no other gets the same identity."""
    is_carried: bool = False
    """Whether a unit has got one of them again."""
    calls: list[str] = field(default_factory=list)
    """Calls since then."""


@final
class CarriedObjects:
    """Carried objects of a step on a stage."""

    def __init__(self) -> None:
        self._given: dict[int, _UnitArguments] = {}

    def note(self, microbatch: int, unit: Callee, args: Any, kwargs: Any) -> None:
        """Note the arguments of a call."""
        leaves = leaves_of((args, kwargs))
        given = self._given.get(microbatch)
        if given is None:
            given = self._given[microbatch] = _UnitArguments()
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and is_object(leaf):
                key = (unit.key, id(leaf))
                given.is_carried |= key in given.objects
                given.objects[key] = leaf
        if given.is_carried:
            given.calls.append(f"{unit.key}: {' '.join(map(_about, leaves))}")

    def take(self) -> dict[int, list[str]]:
        """Calls to be compared, by microbatch; they are forgotten here."""
        calls = {microbatch: given.calls for microbatch, given in self._given.items() if given.is_carried}
        self._given.clear()
        return calls

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context of a step: its errors tell of objects that units have got again."""
        try:
            yield
        except Exception as error:
            if any(given.is_carried for given in self._given.values()):
                error.add_note(f"A unit has got an object for the second time. {CARRIED_REASON}")
            raise
        finally:
            self._given.clear()


def _about(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        is_whole = not (isinstance(leaf, PlacedTensor) or leaf.is_floating_point() or leaf.is_complex())
        return f"{list(leaf.shape)}{f' with sum {leaf.sum().item()}' if is_whole else ''}"
    return str(leaf) if isinstance(leaf, (bool, int, float)) else "-"
