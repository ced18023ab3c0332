"""What every program on a stage has in common: where it runs, who predicts for it, and how values travel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch

from smp_strategy.activations.unit_wrapper import UnitWrapper
from smp_strategy.model.rng import Streams
from smp_strategy.model.trace.exposed_attributes import ExposedAttributes
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.pipeline.current_program import CurrentProgram
from smp_strategy.pipeline.global_rng import GlobalGenerators
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.local_graph import LocalGraph
from smp_strategy.pipeline.microbatch_order import Gate
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.record import Latest, ProgramTrace
from smp_strategy.pipeline.rehearsal import Rehearsal
from smp_strategy.pipeline.results import begin_to_make_real
from smp_strategy.pipeline.routing import Router
from smp_strategy.pipeline.stage_context import StageContext, WithWeights, weights_are_there
from smp_strategy.pipeline.transport import Receipt, Transport
from smp_strategy.pipeline.user_collectives import Replicas

__all__ = ["Stage"]


@final
@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a pipeline, as this rank sees it."""

    number: int
    """This rank's stage; -1 for a dry run that computes nothing."""
    stage_of: Mapping[str, int]
    """Stage of each unit, by qualified name."""
    num_stages: int
    oracle: ShapeInference
    """Predicts results of calls."""
    transport: Transport | None
    """Carries values between stages; ``None`` where there is only one."""
    device: torch.device
    """Where the units run."""
    with_weights: WithWeights = weights_are_there
    """Called with each unit that runs on this stage."""
    activations: UnitWrapper = field(default_factory=UnitWrapper)
    """Decides what units keep for backward."""
    reads_refused: str = ""
    """Why Python code must not see values in steps; empty: it may."""
    replicas: Replicas = field(default_factory=Replicas)
    """The ranks that the user's code takes for all ranks."""
    agree: Callable[[bool], bool] = bool
    """Whether something is true on all ranks that split layers of this stage between them."""
    latest: Latest = field(default_factory=Latest)
    """The record that new programs begin by following."""
    leftovers: ExposedAttributes | None = None
    """Set where programs run to be looked at only: what units leave in attributes."""
    rehearsal: Rehearsal | None = None
    """Set where they run to see what happens when they take turns."""

    @property
    def is_dry(self) -> bool:
        """Whether what programs compute is thrown away."""
        return self.leftovers is not None or self.rehearsal is not None

    @cached_property
    def streams(self) -> Streams:
        """Random streams for programs."""
        return Streams(self.device)

    def program(
        self,
        *,
        microbatch: int,
        seed: int = 0,
        generators: GlobalGenerators | None = None,
        pause: Callable[[Sequence[Receipt]], None] = lambda receipts: None,
        expected: Sequence[object] | None = None,
        gate: Gate | None = None,
        current: CurrentProgram | None = None,
    ) -> MicrobatchInterpreter:
        """A new program on this stage; see :class:`~smp_strategy.pipeline.interpreter.MicrobatchInterpreter`."""
        context = StageContext(
            stage=self.number,
            oracle=self.oracle,
            current=current or CurrentProgram(),
            share=self.make_known,
            streams=self.streams,
            with_weights=self.with_weights,
            activations=self.activations,
            reads_refused=self.reads_refused,
            leftovers=self.leftovers,
            rehearsal=self.rehearsal,
        )
        return MicrobatchInterpreter(
            context,
            microbatch=microbatch,
            seed=seed,
            generators=generators,
            gate=gate,
            record=ProgramTrace(lambda: Router(self.stage_of, self.num_stages), expected, self.latest),
            graph=LocalGraph(stage=self.number, microbatch=microbatch, transport=self.transport, pause=pause),
        )

    def make_known(self, tensors: Sequence[PlacedTensor]) -> None:
        """Give every stage the values of ``tensors``; collective."""
        for tensor, value in zip(tensors, self.make_real(list(tensors)), strict=True):
            tensor.known = value

    def make_real(self, tree: Any) -> Any:
        """``tree`` with every tensor detached and every placed tensor replaced by its value, on all stages."""
        return self.begin_to_make_real(tree)()

    def begin_to_make_real(self, tree: Any) -> Callable[[], Any]:
        """Begin to do so; returns what waits for it."""
        return begin_to_make_real(tree, self.transport, self.number, self.num_stages)
