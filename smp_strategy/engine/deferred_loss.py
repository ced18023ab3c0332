"""Deferred loss: a forward whose loss the caller computes outside of the step, with the backward in a later call.

In ``criterion(model(x), y).backward()`` the library is called twice, with the caller's code in between. So the
microbatches run forward and pause. Their outputs are real tensors on every rank of the replica, and every rank computes
the loss from them. Backward begins with the gradients of the outputs: each microbatch resumes with the sum of its
outputs times these gradients, which is a loss with exactly these gradients, bit for bit.

All microbatches run forward before the first backward, so all of their activations are kept, as under the schedule
``simple`` (GPipe).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

from torch import Tensor

from smp_strategy.model.trace.pytree import flatten, is_opened_placed
from smp_strategy.pipeline.barriers import PausedStep

__all__ = ["BackwardRequest", "ForwardStep", "deferring_loss"]

Gradients = Sequence[Tensor | None]
"""Gradients of the leaves of one microbatch's outputs."""
Once = Callable[[str, Callable[[list[Any]], Any], Any], Any]
"""Type of :meth:`smp_strategy.engine.manual_optimization.ManualSteps.once`."""


class BackwardRequest(NamedTuple):
    """Message with which paused microbatches resume."""

    gradients: Sequence[Gradients]
    backward: Callable[[list[Any]], None]
    """Runs backward, given a loss of each microbatch."""
    is_last: bool
    """Whether no other backward follows."""


def deferring_loss(
    step: Callable[[Any], Any], once: Once, make_real: Callable[[list[Any]], Any]
) -> Callable[[Any], None]:
    """``step`` for a microbatch with its number, which then waits for the gradients of its outputs."""

    def run(numbered: tuple[int, Any]) -> None:
        number, microbatch = numbered
        output = step(microbatch)
        asked: BackwardRequest | None = once("the caller of the model", make_real, output)
        while asked is not None:
            once("`backward`", asked.backward, _loss(output, asked.gradients[number]))
            asked = None if asked.is_last else once("the caller of the model", lambda values: None, None)

    return run


def _loss(output: Any, gradients: Gradients) -> Tensor:
    """Scalar with ``gradients`` with respect to the leaves of ``output``; its value means nothing."""
    pairs = zip(flatten(output, None, is_opened_placed)[0], gradients, strict=True)
    terms = [(leaf * gradient).sum() for leaf, gradient in pairs if gradient is not None]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@final
class ForwardStep:
    """Outputs of a forward, and the backward that may follow.

    Args:
        outputs: Output of the step for each microbatch, with real detached tensors; equal on all ranks of a replica.
        backward: Runs their backward, given a loss of each and whether graphs are kept for another one.
    """

    def __init__(
        self,
        outputs: list[Any],
        sizes: tuple[int, ...],
        pause: PausedStep,
        backward: Callable[[list[Any], bool], None],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.outputs = outputs
        self.sizes = sizes
        self._pause = pause
        self._backward = backward
        self._around = around

    @property
    def is_over(self) -> bool:
        """Whether there can be no backward any more."""
        return self._pause.is_over

    def backward(self, gradients: Sequence[Gradients], *, retain_graph: bool = False) -> None:
        """Add to ``.grad`` of this rank's parameters; collective over the replica, and over its shard group.

        Args:
            gradients: Gradients of each microbatch's outputs, one per leaf (in the order of ``torch.utils._pytree``),
                equal on all ranks of a replica; ``None`` for leaves without one. At least one leaf must have one, the
                same leaves in all microbatches.
            retain_graph: Whether another backward will follow.

        Raises:
            RuntimeError: it is over, as in autograd.
        """
        if self._pause.is_over:
            raise RuntimeError(
                "Trying to backward through the model a second time, but what it has kept for that is freed. Specify "
                "`retain_graph=True` when you call `backward` for the first time."
            )
        with self._around():
            self._pause.go_on(
                BackwardRequest(gradients, lambda losses: self._backward(losses, retain_graph), not retain_graph)
            )
            self._pause.go_on()

    def cancel(self) -> None:
        """Free what is kept for a backward; there will be none. Not collective."""
        self._pause.cancel()

    def __del__(self) -> None:
        self.cancel()
