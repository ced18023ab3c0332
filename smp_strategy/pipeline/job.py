"""A step as a job: the user's code with its loss and seed, and the results of all microbatches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.model.trace.events import Trace
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["Job", "Step", "StepRun", "trace_of"]

Step = Callable[[Any], Any]


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """What is done with every microbatch of a step."""

    step: Step
    """The user's code."""
    seed: int
    """Where all random numbers of the step derive from."""
    loss_of: Callable[[Any], Tensor | None] | None = None
    """Picks the loss out of what ``step`` returns, or ``None`` where the step skips its microbatch; no function:
    forward only."""
    weights: Sequence[float] = ()
    """Factor of each microbatch's loss."""
    expected: Sequence[object] | None = None
    """Signatures of the events that the plan was made for; ``None`` where there is no plan."""
    gate: int | None = None
    """After how many events a microbatch waits for those before it to end, if it does."""
    around_last: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered from the last backward action of the plan on: gradients to which nothing is added in here are final."""


@final
@dataclass(frozen=True)
class StepRun:
    """What came out of a step."""

    outputs: list[Any]
    """The step's return values, one per microbatch, with real detached tensors on every stage."""
    losses: list[Tensor | None]
    """Loss of each microbatch that has one, real and detached on every stage."""
    trace: Trace
    """Events of the first microbatch that has a loss, if any has."""

    def loss(self, weights: Sequence[float]) -> Tensor | None:
        """The sum of the microbatches' losses times ``weights``, if any has one; a scalar."""
        weighted = [
            loss.reshape(()) * loss.new_tensor(weight)
            for loss, weight in zip(self.losses, weights, strict=True)
            if loss is not None
        ]
        return torch.stack(weighted).sum() if weighted else None


def trace_of(program: MicrobatchInterpreter, loss: Any) -> Trace:
    """The record of a program whose loss is ``loss``."""
    number = loss.value.id if isinstance(loss, PlacedTensor) else None
    return Trace([event for event, _ in program.record.events], number)
