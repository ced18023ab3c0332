"""Carried objects: a unit changes them, and the glue gives them to it again (a cache of keys and values, a memory).

Each stage has what its own units have put into such an object. Code above the units that asks the object, for the
length of a cache to make a mask, gets the answer of its own stage, and an empty cache has another length than a full
one. So from the call on in which a unit gets an object for the second time in a microbatch, the stages note the
arguments of units, and compare them at the end of the step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.model.trace.side_effects import is_object
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["CarriedObjects", "refuse_different"]

_REASON = (
    "If code above the units asks such an object, which units change, each stage knows what its own units have put "
    "there: the length of a cache, say. Leave the cache out (`use_cache=False`), or pass what depends on "
    "it to the model (`position_ids`, say)."
)


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

    @contextmanager
    def compared(self, mesh: ProcessMesh) -> Iterator[None]:
        """Context of a step, at whose end all stages compare their calls. Collective if something is carried.

        Args:
            mesh: only for this step, since the process group of the stages ends with its last reference.

        Raises:
            UnsupportedError: stages have called a unit with other arguments.
        """
        try:
            yield
        except Exception as error:
            if any(given.is_carried for given in self._given.values()):
                error.add_note(f"A unit has got an object for the second time. {_REASON}")
            raise
        finally:
            mine = {microbatch: given.calls for microbatch, given in self._given.items() if given.is_carried}
            self._given.clear()
        if mine:
            refuse_different(collectives.gather_objects(mine, "arguments of units", mesh.pp_group))


def refuse_different(stages: Sequence[Mapping[int, Sequence[str]]]) -> None:
    """Raise an :class:`UnsupportedError` if the calls of the stages differ, by microbatch."""
    for microbatch in stages[0]:
        calls = zip(*(each.get(microbatch, ()) for each in stages), strict=False)
        different = next((call for call in calls if len(set(call)) > 1), None)
        if different is not None:
            raise UnsupportedError(
                "A unit is called with other arguments on one stage than on another "
                f"({' and '.join(different)}; shapes, and sums of whole numbers). {_REASON}"
            )


def _about(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        is_whole = not (isinstance(leaf, PlacedTensor) or leaf.is_floating_point() or leaf.is_complex())
        return f"{list(leaf.shape)}{f' with sum {leaf.sum().item()}' if is_whole else ''}"
    return str(leaf) if isinstance(leaf, (bool, int, float)) else "-"
