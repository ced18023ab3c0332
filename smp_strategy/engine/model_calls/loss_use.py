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

from smp_strategy.distributed.torch_private import keeps_graph
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
from smp_strategy.engine.step_results import TrainStep, on_graph
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.pytree import flatten_output

__all__ = ["Repetition", "UndecidedCall"]


class Repetition(NamedTuple):
    """Repetition of a call."""

    forward: Callable[[], ForwardStep]
    before: StateBefore


@final
class UndecidedCall:
    """A call that has run forward and backward for its loss, and may run otherwise.

    Args:
        weights: of the losses of its microbatches.
        commit: adds the gradients of the loss, times the given number.
        factor: of the loss in the gradients of inputs.
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
        handed, *others = on_graph([loss.detach().clone(), *found], self.inputs.tensors, self._backward)
        later = iter(others)
        merged = merge(
            [place_on_graph(each, lambda of: [next(later) for _ in of]) for each in outputs], self._step.sizes
        )
        return replace_loss(merged, handed)

    def _backward(self, gradients: Sequence[Tensor | None], trains: bool) -> list[Tensor]:
        """Backward from some of the results; returns the gradients of inputs. Collective if it is not from the loss."""
        loss, *others = gradients
        if loss is not None and self._again is None and all(each is None for each in others):
            if trains:
                self._learn(False)
                self._commit(loss)
            scale = loss / loss.new_tensor(self._factor)
            return [each * scale for each in self._of_inputs]
        if not trains:
            raise only_of_input()
        return self._of_all(loss, others, retain_graph=keeps_graph())

    def _of_all(self, loss: Tensor | None, others: Sequence[Tensor | None], *, retain_graph: bool) -> list[Tensor]:
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
