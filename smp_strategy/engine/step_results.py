"""Results of a step, and the handover of its gradients to ``.grad``.

A step computes its gradients before it is known what they are added to: Lightning and Accelerate run the step first,
then ``zero_grad``, then ``backward``. So they are kept aside until ``backward``. Floating-point sums depend on their
order, though: if the gradients will be added to those of earlier batches, the step accumulates onto a copy of these,
and the new sum is handed over.

[Note: commit] The returned loss has a single node in its graph. The backward of that node multiplies the gradient of
the mean loss by the incoming gradient and adds the product to ``.grad``. So anything done to the loss before
``backward()`` (division by the accumulated batches, a weight, a user's own backward) acts on the gradients as in a
single process.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from smp_strategy.data_parallel.bucketed_all_reduce import BucketedAllReduce
from smp_strategy.data_parallel.buffer_sync import Notes
from smp_strategy.data_parallel.reduction import Reduction
from smp_strategy.distributed.torch_private import will_run
from smp_strategy.errors import UnsupportedError
from smp_strategy.precision.master_weights import widened

__all__ = ["Accumulated", "EvalStep", "TrainStep", "accumulating", "loss_that_commits", "on_graph"]

Backward = Callable[[Sequence[Tensor | None], bool], Sequence[Tensor]]
"""Backward from the gradients of results, and whether it reaches more than the inputs; returns those of the inputs."""


@final
@dataclass(frozen=True)
class EvalStep:
    """Results of a step that hands over no gradients, equal on all ranks of a replica."""

    outputs: list[Any]
    """Output of the step for each microbatch, with real detached tensors."""
    sizes: tuple[int, ...]
    """Samples in each microbatch."""


@final
@dataclass(frozen=True)
class Accumulated:
    """Gradients of a step."""

    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Gradients by parameter, of the parameters that have one; on top of ``base``."""
    base: dict[nn.Parameter, tuple[Tensor, int]] = field(default_factory=dict)
    """Earlier ``.grad`` that a gradient continues, and its version."""


@contextmanager
def accumulating(parameters: Sequence[nn.Parameter], *, continues: bool) -> Iterator[Accumulated]:
    """Catch the gradients that are added to ``parameters`` in this context; on exit ``.grad`` is put back."""
    before = [parameter.grad for parameter in parameters]
    found = Accumulated()
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = None
        if continues and gradient is not None:
            found.base[parameter] = (gradient, gradient._version)
            parameter.grad = gradient.clone()
    try:
        yield found
        found.gradients.update((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@final
@dataclass(frozen=True)
class TrainStep:
    """Results of a training step, and its gradients until they are handed over."""

    outputs: list[Any]
    """Output of the step for each microbatch, with real detached tensors."""
    sizes: tuple[int, ...]
    """Samples in each microbatch."""
    loss: Tensor | None
    """Mean over the samples of the batch, to which skipped microbatches add nothing; scalar, equal on all ranks of a
    replica. ``None``: all were skipped."""
    _accumulated: Accumulated
    _factor: float
    _reduction: Reduction
    _averages: BucketedAllReduce | None = None
    """All-reduces that began during the step, if it was known that they would be needed."""

    def commit(self, grad_output: Tensor, *, reduce: bool) -> None:
        """Add ``grad_output`` times the gradient of the mean loss to ``.grad`` of this rank's parameters.

        Args:
            grad_output: Gradient of the minimised value with respect to the loss; scalar.
            reduce: Whether the optimizer steps next: then sum over the stages that hold a parameter, and average over
                the replicas. Collective over the ranks.
        """
        given = grad_output.item()
        # Compared in the dtype of the loss, so that the expected factor multiplies nothing.
        scale = 1.0 if given == grad_output.new_tensor(self._factor).item() else given / self._factor
        averaged, notes = self._averaged()
        self._reduction.begin_backward(averaged)
        for parameter, gradient in self._accumulated.gradients.items():
            self._hand_over(parameter, gradient, scale)
        self._accumulated.gradients.clear()
        self._accumulated.base.clear()
        if reduce:
            self._reduction.reduce(notes)

    def discard(self) -> None:
        """Drop the gradients: they will not be handed over. Collective over the replicas, as a commit is."""
        self._averaged()
        self._accumulated.gradients.clear()
        self._accumulated.base.clear()

    def _averaged(self) -> tuple[Collection[nn.Parameter], Notes | None]:
        """Replace gradients by averages over the replicas, if there are some; returns their parameters, and the buffer
        notes that came with them.
        """
        if self._averages is None:
            return (), None
        found, notes = self._reduction.finish(self._averages)
        for parameter in self._averages.parameters:
            self._accumulated.gradients.pop(parameter, None)
        self._accumulated.gradients.update(found)
        return self._averages.parameters, notes

    def _hand_over(self, parameter: nn.Parameter, gradient: Tensor, scale: float) -> None:
        bases = self._accumulated.base
        base, version = bases.get(parameter, (None, 0)) if bases else (None, 0)
        if base is not None:
            if base._version != version:
                raise UnsupportedError(
                    "Gradients of earlier batches were changed in place between `training_step` and `backward`, while "
                    "batches are accumulated. Change them in `on_before_optimizer_step`."
                )
            # `gradient` is the new sum. It replaces `base`; a scale, however, must not act on `base`.
            if parameter.grad is base and scale == 1.0:
                parameter.grad = gradient
                return
            gradient.sub_(base)
        if scale != 1.0:
            gradient = widened(parameter, gradient).mul_(scale)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad = widened(parameter, parameter.grad).add_(gradient)


def loss_that_commits(loss: Tensor, commit: Callable[[Tensor], None]) -> Tensor:
    """``loss``, whose ``backward()`` calls ``commit`` with the incoming gradient. See [Note: commit]."""

    def run(gradients: Sequence[Tensor | None], trains: bool) -> Sequence[Tensor]:
        [gradient] = gradients
        assert gradient is not None
        commit(gradient)
        return ()

    return on_graph([loss.detach().clone()], (), run)[0]


def on_graph(results: Sequence[Tensor], inputs: Sequence[Tensor], run: Backward) -> Sequence[Tensor]:
    """``results`` on the graph of the script, above ``inputs``: their backward is ``run``."""
    anchor = torch.zeros((), device=results[0].device, requires_grad=True)
    found: Sequence[Tensor] = _Results.apply(anchor, run, len(inputs), *inputs, *results)  # type: ignore[no-untyped-call]
    return found


class _Results(torch.autograd.Function):
    """Identity of results; see :func:`on_graph`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: Any, num_inputs: int, *tensors: Tensor) -> Any:
        ctx.run, ctx.anchor, ctx.num_results = run, get_gradient_edge(anchor).node, len(tensors) - num_inputs
        ctx.set_materialize_grads(False)
        return tuple(leaf.detach() for leaf in tensors[num_inputs:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        of_inputs = ctx.run(gradients, will_run(ctx.anchor))
        return None, None, None, *of_inputs, *(None for _ in range(ctx.num_results))
