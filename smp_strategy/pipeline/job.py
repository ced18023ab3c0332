"""Job and result of a step: the user's code with its loss and seed, and the outputs of all microbatches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Trace
from smp_strategy.pipeline.batch_loss.loss_weights import LossWeights
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["Job", "Step", "StepRun", "check_loss", "trace_of"]

Step = Callable[[Any], Any]
"""The user's code: takes a microbatch, returns any tree."""


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """Step to be run on every microbatch."""

    step: Step
    seed: int
    """Seed of all random streams of the step."""
    loss_of: Callable[[Any], Tensor | None] | None = None
    """Picks the loss from the result of ``step``, or ``None`` if the step skips its microbatch; no function: forward
    only."""
    weights: Sequence[float] = ()
    """Factor of each microbatch's loss."""
    loss_weights: LossWeights | None = None
    """Weights of the terms of the losses; ``None``: they have none."""
    expected: Sequence[object] | None = None
    """Signatures of the events that the plan was made for; ``None`` without a plan."""
    carries_state: bool = False
    """Whether each microbatch begins with what the one before it has left: they run one after the other."""
    around_last: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context entered from the last backward action of the plan on: gradients to which it adds nothing are final."""


@final
@dataclass(frozen=True)
class StepRun:
    """Result of a step."""

    outputs: list[Any]
    """The step's return values, one per microbatch, with real detached tensors on every stage."""
    losses: list[Tensor | None]
    """Loss of each microbatch that has one, real and detached on every stage."""
    trace: Trace
    """Events of the first microbatch that has a loss, if any has."""

    def loss(self, weights: Sequence[float]) -> Tensor | None:
        """Sum of the microbatches' losses times ``weights``, a scalar; ``None`` if there are no losses."""
        weighted = [
            loss.reshape(()) * loss.new_tensor(weight)
            for loss, weight in zip(self.losses, weights, strict=True)
            if loss is not None
        ]
        return torch.stack(weighted).sum() if weighted else None


def trace_of(program: MicrobatchInterpreter, loss: Any) -> Trace:
    number = loss.value.id if isinstance(loss, PlacedTensor) else None
    return Trace([event for event, _ in program.program_trace.events], number)


def check_loss(loss: Any) -> None:
    """Refuse what no backward can start from."""
    if not isinstance(loss, Tensor):
        raise UnsupportedError(f"The step must return a loss tensor, but returned {type(loss).__name__}.")
    if loss.numel() != 1:
        raise UnsupportedError(f"The loss must have one element, but has shape {list(loss.shape)}.")
    if not loss.requires_grad:
        raise UnsupportedError(
            "The loss does not require a gradient: it depends on no parameter that requires one, or was computed "
            "under torch.no_grad(), from a detached tensor, or from values that were read (by a metric, say)."
        )
