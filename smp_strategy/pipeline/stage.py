"""Pipeline stage of this rank: configuration and services that all of its programs share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import nn

from smp_strategy.activations.unit_wrapper import UnitWrapper
from smp_strategy.model.rng import Streams
from smp_strategy.model.trace.exposed_attributes import ExposedAttributes
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.pipeline.dist_calls.user_collectives import Replicas
from smp_strategy.pipeline.isolation.carried_objects import CarriedObjects
from smp_strategy.pipeline.isolation.rehearsal import Rehearsal
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.program_trace import Latest
from smp_strategy.pipeline.results import begin_to_make_real
from smp_strategy.pipeline.transport.transport import Transport

__all__ = ["Stage", "WithWeights"]

WithWeights = Callable[[str, Callable[..., Any], object], Callable[..., Any]]
"""Wraps the forward of a unit so that it finds its weights, which may be sharded. Arguments: the unit's name, its
forward, and a token that identifies the thread: equal for calls that are made one after the other."""


def _weights_are_there(unit: str, function: Callable[..., Any], token: object) -> Callable[..., Any]:
    """Return ``function`` as it is: the weights are not sharded."""
    return function


@final
@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a pipeline, as seen by this rank."""

    number: int
    """This rank's stage; -1 for a dry run that computes nothing."""
    stage_of: Mapping[str, int]
    """Stage of each unit, by qualified name."""
    num_stages: int
    shape_inference: ShapeInference
    transport: Transport | None
    """Transport of values between stages; ``None`` for a single stage."""
    device: torch.device
    """Device of the units."""
    with_weights: WithWeights = _weights_are_there
    """Wrapper of each unit that runs on this stage, which provides its weights."""
    activations: UnitWrapper = field(default_factory=UnitWrapper)
    """Activation policy of the units: recomputation and offload."""
    backward: Callable[..., None] = torch.autograd.backward
    """Runs autograd from some roots on, and adds to the gradients of leaves."""
    reads_refused: str = ""
    """Reason why Python code must not see values in steps; empty: it may."""
    parameters_refused: str = ""
    """Reason why steps must not ask for gradients of parameters; empty: they may."""
    glue: Sequence[nn.Module] = ()
    replicas: Replicas = field(default_factory=Replicas)
    """Ranks that stand for all ranks in the user's code."""
    agree: Callable[[bool], bool] = bool
    """Returns whether a condition holds on all tensor-parallel ranks of this stage; collective over them."""
    carried: CarriedObjects = field(default_factory=CarriedObjects)
    """Arguments of units, which stages compare if objects come to units again."""
    note_inputs: Callable[[list[tuple[str, int, float]], list[tuple[str, int, float]]], None] | None = None
    """Lets tensor-parallel ranks of this stage compare plain tensors that units get, and losses; ``None``: there are no
    others."""
    latest: Latest = field(default_factory=Latest)
    """Holder of the trace that new programs follow."""
    exposed: ExposedAttributes | None = None
    """Attributes that units set, in a dry run; else ``None``."""
    rehearsal: Rehearsal | None = None
    """Rehearsal of the order of microbatches; ``None`` if programs do not rehearse."""

    @property
    def is_dry(self) -> bool:
        """Whether this is a dry run, whose results are thrown away."""
        return self.exposed is not None or self.rehearsal is not None

    @property
    def compares_inputs(self) -> bool:
        """Whether ranks compare plain tensors that units get."""
        return self.transport is not None or self.note_inputs is not None

    @cached_property
    def streams(self) -> Streams:
        """Random streams for programs."""
        return Streams(self.device)

    def make_known(self, tensors: Sequence[PlacedTensor]) -> None:
        """Broadcast the values of ``tensors`` to every stage, and keep them as ``known``; collective."""
        for tensor, value in zip(tensors, self.make_real(list(tensors)), strict=True):
            tensor.known = value

    def make_real(self, tree: Any) -> Any:
        """Replace placed tensors in ``tree`` by their values on all stages, and detach all tensors; collective."""
        return self.begin_to_make_real(tree)()

    def begin_to_make_real(self, tree: Any) -> Callable[[], Any]:
        """Begin :meth:`make_real`; returns a function that waits for the result."""
        return begin_to_make_real(tree, self.transport, self.number, self.num_stages)
