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
    InputGradients,
    ResultLeaves,
    loss_in,
    only_of_input,
    only_once,
    place_on_graph,
    replace_loss,
)
from smp_strategy.engine.repeated_step import StateBefore
from smp_strategy.engine.step_results import TrainStep, on_graph
from smp_strategy.errors import UnsupportedError

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
        combine: see :func:`~smp_strategy.engine.model_calls.model_outputs.gradients_come_later`.
        learn: is told whether backward has reached more than the loss.
    """

    def __init__(
        self,
        step: TrainStep,
        weights: Sequence[float],
        *,
        commit: Callable[[Tensor], None],
        inputs: ModelInputs,
        ready: InputGradients,
        repetition: Repetition,
        combine: Callable[[Tensor], Tensor] | None,
        learn: Callable[[bool], None],
    ) -> None:
        self._inputs, self._ready = inputs, ready
        self._step = step
        self._weights = weights
        self._commit = only_once(commit)
        self._repetition = repetition
        self._combine = combine
        self._learn = learn
        self._again: ForwardStep | None = None
        self._leaves = ResultLeaves(step.outputs)
        # The script may change results in place; then they are not compared.
        self._versions = [leaf._version for leaf in self._leaves.tensors]

    def result(self) -> Any:
        """Merged result, of which each part trains."""
        outputs, loss = self._step.outputs, self._step.loss
        assert loss is not None
        handed, *others = on_graph([loss.detach().clone(), *self._leaves.tensors], self._inputs.tensors, self._backward)
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
            return self._ready.at(loss)
        if not trains:
            raise only_of_input()
        return self._of_all(loss, others, retain_graph=keeps_graph())

    def _of_all(self, loss: Tensor | None, others: Sequence[Tensor | None], *, retain_graph: bool) -> list[Tensor]:
        """Backward from any results, of which ``others`` are those of the microbatches. Collective."""
        self._learn(True)
        given = self._leaves.gradients(others, self._combine)
        if loss is not None:
            own = [loss_in(packed.result) for packed in self._step.outputs]
            for (number, place), leaf in zip(self._leaves.places, self._leaves.tensors, strict=True):
                if leaf is own[number]:
                    given[number][place] = loss * self._weights[number]
        if self._again is None:
            self._step.discard()
            with self._repetition.before.again(), torch.enable_grad():
                self._again = self._repetition.forward()
                self._check_same(self._again)
                self._again.backward(given, retain_graph=retain_graph)
        else:
            self._again.backward(given, retain_graph=retain_graph)
        return self._inputs.gradients() if self._inputs else []

    def _check_same(self, again: ForwardStep) -> None:
        before, after = self._leaves, ResultLeaves(again.outputs)
        pairs = zip(before.tensors, after.tensors, self._versions, strict=False)
        if (again.sizes, after.places) != (self._step.sizes, before.places) or not all(
            old._version != version or torch.allclose(old, new, rtol=1e-2, atol=1e-4, equal_nan=True)
            for old, new, version in pairs
        ):
            raise UnsupportedError(
                "The first backward has reached results of the model beside its loss. So the model has run once more, "
                "but has returned something else than before: it depends on more than its state and its batch. Set "
                "`loss_in_model=False` in SMPPlugin: then backward runs when the script calls it, for any function of "
                "what the model returns."
            )
