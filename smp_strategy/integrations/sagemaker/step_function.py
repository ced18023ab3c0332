"""``@smp.step``: a function that runs once per microbatch, with the model's forward and backward in it.

The function becomes the engine's step. ``model.backward(loss)`` in it notes the loss of the microbatch, and backward
runs when the schedule says so: code between that call and the end of the function must not read gradients, which
SageMaker's library forbids as well. If a call notes no loss, there is only a forward. Whether it does is found out by a
dry run before the first call of its kind; under ``torch.no_grad()`` it does not.

Python code of the function runs on every rank, once per microbatch.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, final, overload

import torch
from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.integrations.sagemaker.run_state import current_run
from smp_strategy.integrations.sagemaker.step_values import StepInputs, check_names

__all__ = ["MicrobatchLosses", "StepValue", "is_tracing", "losses_of_microbatch", "note_losses", "step"]

Function = Callable[..., Any]


@final
class MicrobatchLosses:
    """Losses that the code of a microbatch has noted, if backward will run."""

    def __init__(self, *, may_note: bool) -> None:
        self.may_note = may_note
        self._total: Tensor | None = None

    def add(self, tensors: Any, gradients: Any) -> None:
        """Add the arguments of a ``backward``."""
        if not self.may_note:
            raise UnsupportedError(
                "`model.backward` was called in a step that runs forward only: under `torch.no_grad()`, or because a "
                "call with arguments of the same kind did not call it before. Give functions for training and for "
                "evaluation a name each, or an argument that tells them apart."
            )
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        factors = [gradients] * len(given) if gradients is None or isinstance(gradients, Tensor) else list(gradients)
        for tensor, factor in zip(given, factors, strict=True):
            term = tensor if factor is None else (tensor * factor).sum()
            self._total = term if self._total is None else self._total + term

    @property
    def total(self) -> Tensor | None:
        """Sum of all losses; ``None``: there are none."""
        return self._total


class StepValue(NamedTuple):
    """Result of a microbatch."""

    result: Any
    """Result of the function."""
    loss: Tensor | None
    """Sum of the losses that it has noted."""


_MICROBATCH: Final[ContextVar[MicrobatchLosses | None]] = ContextVar("smp_microbatch", default=None)


def losses_of_microbatch() -> MicrobatchLosses | None:
    """Losses of the microbatch whose code runs now; ``None`` outside of a step."""
    return _MICROBATCH.get()


def note_losses(function: Function, inputs: StepInputs, *, may_note: bool) -> Callable[[Any], StepValue]:
    """Make the engine's step of a call of the user's ``function``."""

    def run(microbatch: Mapping[str, Any]) -> StepValue:
        losses = MicrobatchLosses(may_note=may_note)
        before = _MICROBATCH.set(losses)
        try:
            result = inputs.call(function, microbatch)
        finally:
            _MICROBATCH.reset(before)
        return StepValue(result, losses.total)

    return run


def is_tracing() -> bool:
    """Whether code of a step runs dry now, on tensors without values."""
    return losses_of_microbatch() is not None and any(model.engine.is_tracing for model in current_run().models)


@overload
def step(
    func: None = None,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[Function], Function]: ...


@overload
def step(func: Function) -> Function: ...


def step(
    func: Function | None = None,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Decorate a function that runs once per microbatch.

    Example::

        @smp.step
        def train_step(model, data, target):
            output = model(data)
            loss = F.nll_loss(output, target)
            model.backward(loss)
            return output, loss

    Args:
        func: the function, if the decorator has no arguments.
        non_split_inputs: names of arguments that go whole to each microbatch.
        input_split_axes: dim along which tensors of an argument are cut; 0 for others.
        detach_outputs: accepted. Outputs are always detached: backward is over when the call returns.

    Returns:
        A function that returns what ``func`` returns, with a
        :class:`~smp_strategy.integrations.sagemaker.step_values.StepOutput` for each tensor and a list for each other
        value.
    """
    if func is None:
        return functools.partial(
            _decorated,
            whole=tuple(non_split_inputs or ()),
            axes=dict(input_split_axes or {}),
            detaches=detach_outputs,
        )
    return _decorated(func, whole=(), axes={}, detaches=True)


def _decorated(function: Function, *, whole: Sequence[str], axes: Mapping[str, int], detaches: bool) -> Function:
    check_names(function, whole, "non_split_inputs")
    check_names(function, axes.keys(), "input_split_axes")
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if losses_of_microbatch() is not None:
            return function(*args, **kwargs)
        if not detaches:
            current_run().note(
                "`detach_outputs=False` has no effect: backward is over when a step returns, so its outputs are "
                "detached."
            )
        inputs = StepInputs(signature, args, kwargs, whole=whole, axes=axes)
        return current_run().model_in(inputs.leaves).run_step(function, inputs)

    return run


def has_gradients(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether there are gradients that others will be added to."""
    return any(parameter.grad is not None for parameter in parameters)
