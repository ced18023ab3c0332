"""A forward whose loss is computed by code that is no part of the step.

In ``criterion(model(x), y).backward()`` the library is called twice, and what happens in between is the caller's. So
the microbatches run forward and wait. Their outputs are real tensors on every rank of the replica, and every rank
computes the loss from them. Backward begins with the gradients of the outputs: each microbatch goes on with the sum of
its outputs times these, whose gradient they are, bit for bit.

All microbatches have run forward before the first backward, so all of their activations are kept, as under the schedule
``simple`` (GPipe).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

from torch import Tensor

from smp_strategy.model.trace.pytree import flatten
from smp_strategy.pipeline.barriers import PausedStep

__all__ = ["BackwardRequest", "ForwardStep", "program_of"]

Gradients = Sequence[Tensor | None]
"""Of the leaves of what one microbatch has returned."""
Once = Callable[[str, Callable[[list[Any]], Any], Any], Any]
"""See :meth:`smp_strategy.engine.manual_optimization.ManualSteps.once`."""


class BackwardRequest(NamedTuple):
    """What the microbatches are asked for when they go on."""

    gradients: Sequence[Gradients]
    backward: Callable[[list[Any]], None]
    """Does it, with a loss of each microbatch."""
    is_last: bool
    """Whether there will be no other backward."""


def program_of(step: Callable[[Any], Any], once: Once, share: Callable[[list[Any]], Any]) -> Callable[[Any], None]:
    """``step`` for a microbatch with its number, which then waits for gradients of what it has returned.

    Args:
        step: the user's code.
        once: stops at a barrier.
        share: makes the outputs of all microbatches real.
    """

    def run(numbered: tuple[int, Any]) -> None:
        number, microbatch = numbered
        output = step(microbatch)
        asked: BackwardRequest | None = once("the caller of the model", share, output)
        while asked is not None:
            once("`backward`", asked.backward, _loss(output, asked.gradients[number]))
            asked = None if asked.is_last else once("the caller of the model", lambda values: None, None)

    return run


def _loss(output: Any, gradients: Gradients) -> Tensor:
    """What has ``gradients`` with respect to the leaves of ``output``; its value means nothing."""
    pairs = zip(flatten(output)[0], gradients, strict=True)
    terms = [(leaf * gradient).sum() for leaf, gradient in pairs if gradient is not None]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@final
class ForwardStep:
    """What a forward has returned, and the backward that may follow.

    Args:
        outputs: what the step returned for each microbatch, with real detached tensors; the same on every rank of a
            replica.
        sizes: samples in each microbatch.
        pause: the microbatches, which wait.
        backward: does their backward, given a loss of each and whether graphs are kept for another one.
        around: to be entered around that.
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
            gradients: of each microbatch's outputs, one for each of their leaves (as ``torch.utils._pytree`` finds
                them), the same on every rank of a replica; ``None`` for those that have none. At least one must have
                one, the same in all microbatches.
            retain_graph: there will be another backward.

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
        """There will be no backward: let go of what is kept for it. Not collective."""
        self._pause.cancel()

    def __del__(self) -> None:
        self.cancel()
