"""Services that all programs of a stage share: shape inference, random streams, and the wrappers of units."""

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
"""Wraps the forward of a unit so that it finds its weights, which may be sharded. Arguments: the unit's name, its
forward, and a token that identifies the thread: equal for calls that are made one after the other."""


def weights_are_there(unit: str, function: Callable[..., Any], token: object) -> Callable[..., Any]:
    """Return ``function`` as it is: the weights are not sharded."""
    return function


@final
@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Services of the programs of one stage; see :class:`~smp_strategy.pipeline.stage.Stage`, which makes it."""

    stage: int
    """This rank's stage; -1 for a dry run that computes nothing."""
    shape_inference: ShapeInference
    """Shape inference for the results of calls."""
    current: CurrentProgram
    """Holder of the running program, which takes over operations on tensors of ended programs."""
    make_known: Callable[[Sequence[PlacedTensor]], None]
    """Broadcasts the values of tensors of ended programs to every stage; collective."""
    streams: Streams
    """Random streams for calls that draw numbers."""
    with_weights: WithWeights
    """Wrapper of each unit that runs on this stage, which provides its weights."""
    reads_refused: str
    """Reason why Python code must not see values; empty: it may."""
    activations: UnitWrapper
    """Activation policy of the units."""
    exposed: ExposedAttributes | None
    """Attributes that units set, in a survey, whose results are thrown away; else ``None``."""
    rehearsal: Rehearsal | None
    """Rehearsal of the order of microbatches; ``None`` if programs do not rehearse."""
