"""Generation with a cache: each stage has the keys and values of its own units, and asks it for its length.

Code above the units makes masks of the length that the cache reports, for its first layer mostly, which is empty on all
stages but one. Text without padding needs no mask. With padding the cache is left out, which takes longer and gives the
same text. To be sure, the stages compare with what they have called units.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import flatten
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["StageCalls", "refuse_different", "without_cache"]


def without_cache(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``generate``, without a cache if the text is padded."""
    mask = kwargs.get("attention_mask")
    is_padded = isinstance(mask, Tensor) and not bool(mask.all())
    return {**kwargs, "use_cache": False} if is_padded else dict(kwargs)


@final
class StageCalls:
    """What the units were called with on this stage, as far as it must be alike on all of them.

    Attributes:
        calls: description of each call.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()

    def note(self, unit: Callee, args: Any, kwargs: Any) -> None:
        """Note a call."""
        self.calls.append(f"{unit.key}: {' '.join(map(_about, flatten((args, kwargs))[0]))}")

    def compare(self, mesh: ProcessMesh) -> None:
        """Compare the calls of all stages. Collective over them.

        Raises:
            UnsupportedError: they differ.
        """
        stages = collectives.gather_objects(self.calls, "calls of units in `generate`", mesh.pp_group)
        refuse_different(stages)


def refuse_different(stages: Sequence[Sequence[str]]) -> None:
    """Raise an :class:`UnsupportedError` if the calls of the stages differ."""
    different = next((call for call in zip(*stages, strict=False) if len(set(call)) > 1), None)
    if different is not None:
        raise UnsupportedError(
            "`generate` has called a unit with other arguments on one stage than on another "
            f"({' and '.join(different)}; shapes, and sums of whole numbers). Code above the units has asked an object "
            "that units change, of which each stage knows what its own units have put there: the length of a cache, "
            "say. Generate without it (`use_cache=False`)."
        )


def _about(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        is_whole = not (isinstance(leaf, PlacedTensor) or leaf.is_floating_point() or leaf.is_complex())
        return f"{list(leaf.shape)}{f' with sum {leaf.sum().item()}' if is_whole else ''}"
    return str(leaf) if isinstance(leaf, (bool, int, float)) else "-"
