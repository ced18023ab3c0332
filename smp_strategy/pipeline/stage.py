"""Pipeline stage of this rank: configuration and services of its programs, and the factory that makes them."""

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
from smp_strategy.pipeline.program_trace import Latest, ProgramTrace
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
    """One stage of a pipeline, as seen by this rank."""

    number: int
    """This rank's stage; -1 for a dry run that computes nothing."""
    stage_of: Mapping[str, int]
    """Stage of each unit, by qualified name."""
    num_stages: int
    """Number of stages."""
    shape_inference: ShapeInference
    """Shape inference for the results of calls."""
    transport: Transport | None
    """Transport of values between stages; ``None`` for a single stage."""
    device: torch.device
    """Device of the units."""
    with_weights: WithWeights = weights_are_there
    """Wrapper of each unit that runs on this stage, which provides its weights."""
    activations: UnitWrapper = field(default_factory=UnitWrapper)
    """Activation policy of the units: recomputation and offload."""
    reads_refused: str = ""
    """Reason why Python code must not see values in steps; empty: it may."""
    replicas: Replicas = field(default_factory=Replicas)
    """Ranks that stand for all ranks in the user's code."""
    agree: Callable[[bool], bool] = bool
    """Returns whether a condition holds on all tensor-parallel ranks of this stage; collective over them."""
    latest: Latest = field(default_factory=Latest)
    """Holder of the trace that new programs follow."""
    exposed: ExposedAttributes | None = None
    """Attributes that units set, in a survey; else ``None``."""
    rehearsal: Rehearsal | None = None
    """Rehearsal of the order of microbatches; ``None`` if programs do not rehearse."""

    @property
    def is_dry(self) -> bool:
        """Whether this is a dry run, whose results are thrown away."""
        return self.exposed is not None or self.rehearsal is not None

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
        """Make a program on this stage; see :class:`~smp_strategy.pipeline.interpreter.MicrobatchInterpreter`.

        Args:
            microbatch, seed, generators, gate: arguments of the interpreter.
            pause: hands control to the scheduler, with the receives that the program waits for.
            expected: signatures of the events that the plan was made for; ``None`` without a plan.
            current: holder of the running program.
        """
        context = StageContext(
            stage=self.number,
            shape_inference=self.shape_inference,
            current=current or CurrentProgram(),
            make_known=self.make_known,
            streams=self.streams,
            with_weights=self.with_weights,
            activations=self.activations,
            reads_refused=self.reads_refused,
            exposed=self.exposed,
            rehearsal=self.rehearsal,
        )
        return MicrobatchInterpreter(
            context,
            microbatch=microbatch,
            seed=seed,
            generators=generators,
            gate=gate,
            program_trace=ProgramTrace(lambda: Router(self.stage_of, self.num_stages), expected, self.latest),
            graph=LocalGraph(stage=self.number, microbatch=microbatch, transport=self.transport, pause=pause),
        )

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
