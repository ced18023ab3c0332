"""Which results of the model a script trains on: the loss of the model, or others beside it.

Many models return a loss and logits, and their caller decides: ``outputs.loss.backward()``, or a loss of its own from
``outputs.logits`` (distillation, preferences, a weight for each token). Only its first backward tells. Until then a
call is *undecided*: forward and backward for the loss of the model have run, and gradients are kept aside. If backward
reaches another result, they are dropped. The call runs forward once more, from the state before it, this time so that
backward follows with the gradients that the script gives. Nothing has been updated in between, so this yields the same
results; they are compared. All later calls of this kind run in the way that was found.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from smp_strategy.distributed.torch_private import keeps_graph, will_run
from smp_strategy.engine.deferred_loss import ForwardStep
from smp_strategy.engine.join_results import merge
from smp_strategy.engine.model_calls.model_inputs import ModelInputs
from smp_strategy.engine.model_calls.model_outputs import (
    Packed,
    loss_in,
    only_of_input,
    only_once,
    place_on_graph,
    replace_loss,
)
from smp_strategy.engine.repeated_step import StateBefore
from smp_strategy.engine.step_results import TrainStep
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.pytree import flatten_output

__all__ = ["LossUses", "Repetition", "UndecidedCall"]


@final
class LossUses:
    """Trained results, for each kind of call that returns a loss and other differentiable results."""

    def __init__(self) -> None:
        self._is_outside: dict[Any, bool] = {}

    def is_known(self, way: Any) -> bool:
        """Whether a backward has told."""
        return way in self._is_outside

    def is_outside(self, way: Any) -> bool:
        """Whether calls of the kind ``way`` train on other results than the loss."""
        return self._is_outside.get(way, False)

    def learn(self, way: Any, *, is_outside: bool) -> None:
        """Note what a backward has reached; other results are not forgotten."""
        self._is_outside[way] = is_outside or self.is_outside(way)


class Repetition(NamedTuple):
    """Repetition of a call."""

    forward: Callable[[], ForwardStep]
    """Runs it forward only."""
    before: StateBefore
    """State before the call."""


@final
class UndecidedCall:
    """A call that has run forward and backward for its loss, and may run otherwise.

    Args:
        step: has run.
        weights: of the losses of its microbatches.
        commit: adds the gradients of the loss, times the given number.
        factor: of the loss in the gradients of inputs.
        inputs: differentiable inputs.
        repetition: runs the call once more.
        combine: see :func:`~smp_strategy.engine.model_calls.model_outputs.gradients_come_later`.
        learn: is told whether backward has reached more than the loss.
    """

    def __init__(
        self,
        step: TrainStep,
        weights: Sequence[float],
        *,
        commit: Callable[[Tensor], None],
        factor: float,
        inputs: ModelInputs,
        repetition: Repetition,
        combine: Callable[[Tensor], Tensor] | None,
        learn: Callable[[bool], None],
    ) -> None:
        self.inputs = inputs
        self._step = step
        self._weights = weights
        self._commit = only_once(commit)
        self._of_inputs = inputs.gradients() if inputs else []
        self._factor = factor
        self._repetition = repetition
        self._combine = combine
        self._learn = learn
        self._again: ForwardStep | None = None
        # The script may change results in place; then they are not compared.
        self._leaves = [flatten_output(packed)[0] for packed in step.outputs]
        self._places = [(number, place) for number, packed in enumerate(step.outputs) for place in packed.places]
        self._versions = [self._leaves[number][place]._version for number, place in self._places]

    def result(self) -> Any:
        """Merged result, of which each part trains."""
        outputs, loss = self._step.outputs, self._step.loss
        assert loss is not None
        found = [self._leaves[number][place] for number, place in self._places]
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        handed, *others = _Undecided.apply(anchor, self, loss, *self.inputs.tensors, *found)  # type: ignore[no-untyped-call]
        later = iter(others)
        merged = merge(
            [place_on_graph(each, lambda of: [next(later) for _ in of]) for each in outputs], self._step.sizes
        )
        return replace_loss(merged, handed)

    def of_loss(self, gradient: Tensor) -> list[Tensor]:
        """Backward from the loss alone; returns the gradients of inputs."""
        self._learn(False)
        self._commit(gradient)
        return self.of_inputs_only(gradient)

    def of_inputs_only(self, gradient: Tensor) -> list[Tensor]:
        """Gradients of the inputs, if the loss has ``gradient``."""
        scale = gradient / gradient.new_tensor(self._factor)
        return [each * scale for each in self._of_inputs]

    def of_all(self, loss: Tensor | None, others: Sequence[Tensor | None], *, retain_graph: bool) -> list[Tensor]:
        """Backward from any results, of which ``others`` are those of the microbatches. Collective."""
        self._learn(True)
        given: list[list[Tensor | None]] = [[None] * len(each) for each in self._leaves]
        for (number, place), gradient in zip(self._places, others, strict=True):
            given[number][place] = gradient if self._combine is None or gradient is None else self._combine(gradient)
        if loss is not None:
            for number, packed in enumerate(self._step.outputs):
                own = loss_in(packed.result)
                for place in packed.places:
                    if self._leaves[number][place] is own:
                        given[number][place] = loss * self._weights[number]
        if self._again is None:
            self._step.discard()
            with self._repetition.before.again(), torch.enable_grad():
                self._again = self._repetition.forward()
                self._check_same(self._again)
                self._again.backward(given, retain_graph=retain_graph)
        else:
            self._again.backward(given, retain_graph=retain_graph)
        return self.inputs.gradients() if self.inputs else []

    @property
    def is_repeated(self) -> bool:
        """Whether it has run forward once more."""
        return self._again is not None

    def _check_same(self, again: ForwardStep) -> None:
        packed: list[Packed] = again.outputs
        places = [(number, place) for number, each in enumerate(packed) for place in each.places]
        same = again.sizes == self._step.sizes and places == self._places
        if same:
            leaves = [flatten_output(each)[0] for each in packed]
            for (number, place), version in zip(places, self._versions, strict=True):
                old, new = self._leaves[number][place], leaves[number][place]
                is_old = old._version == version
                same = same and (not is_old or torch.allclose(old, new, rtol=1e-2, atol=1e-4, equal_nan=True))
        if not same:
            raise UnsupportedError(
                "The first backward has reached results of the model beside its loss. So the model has run once more, "
                "but has returned something else than before: it depends on more than its state and its batch. Set "
                "`loss_in_model=False` in SMPPlugin: then backward runs when the script calls it, for any function of "
                "what the model returns."
            )


class _Undecided(torch.autograd.Function):
    """Identity of the loss and of all results of the microbatches; backward tells which of them are trained on."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: UndecidedCall, loss: Tensor, *tensors: Tensor) -> Any:
        ctx.call, ctx.anchor = call, get_gradient_edge(anchor).node
        ctx.num_results = len(tensors) - len(call.inputs.tensors)
        ctx.set_materialize_grads(False)
        return loss.detach().clone(), *(leaf.detach() for leaf in tensors[len(call.inputs.tensors) :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss: Tensor | None, *others: Tensor | None) -> Any:
        call: UndecidedCall = ctx.call
        trains = will_run(ctx.anchor)
        if all(each is None for each in others) and loss is not None and not call.is_repeated:
            of_inputs = call.of_loss(loss) if trains else call.of_inputs_only(loss)
        elif not trains:
            raise only_of_input()
        else:
            retain_graph = keeps_graph()
            of_inputs = call.of_all(loss, others, retain_graph=retain_graph)
        return None, None, None, *of_inputs, *(None for _ in range(ctx.num_results))
