"""What the programs of a stage have in common: who predicts, who computes, and what is done around units.

Where a unit finds its weights when it is called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from smp_strategy.activations.unit_wrapper import UnitWrapper
from smp_strategy.model.rng import Streams
from smp_strategy.model.trace.exposed_attributes import ExposedAttributes
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.pipeline.current_program import CurrentProgram
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.rehearsal import Rehearsal

__all__ = ["StageContext", "WithWeights", "weights_are_there"]

WithWeights = Callable[[str, Callable[..., Any], object], Callable[..., Any]]
"""Makes a call of a unit find its weights, which may be spread over ranks. Gets the unit's name, what to call, and
something that stands for the thread: equal for calls that are made one after the other."""


def weights_are_there(unit: str, function: Callable[..., Any], token: object) -> Callable[..., Any]:
    """They are."""
    return function


@final
@dataclass(frozen=True, kw_only=True)
class StageContext:
    """See the module docstring."""

    stage: int
    """This rank's stage; -1 for a dry run that computes nothing."""
    oracle: ShapeInference
    """Predicts results."""
    current: CurrentProgram
    """The program that runs now, if any; tensors of programs that have ended can be used in it."""
    share: Callable[[Sequence[PlacedTensor]], None]
    """Gives every stage the values of tensors whose program has ended; collective."""
    streams: Streams
    """Random streams for calls that draw numbers."""
    with_weights: WithWeights
    """Called with each unit that runs on this stage, and the microbatch."""
    reads_refused: str
    """Why Python code must not see values; empty: it may."""
    activations: UnitWrapper
    """Decides what units keep for backward."""
    leftovers: ExposedAttributes | None
    """Set where programs run to be looked at: what units leave in attributes. What they compute is thrown away."""
    rehearsal: Rehearsal | None
    """Set where they run to see what happens when they take turns."""
