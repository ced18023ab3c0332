"""Placed tensors that outlive their step: a hidden state for the next step, losses for a mean.

They still live on one stage. A later program adopts them like any tensor that exists already (no gradient leads back to
the earlier step). Outside of steps, where all stages run the same hooks, their values are broadcast to all stages.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.exposed_attributes import StaleTensor
from smp_strategy.model.trace.fake_call import imitate
from smp_strategy.model.trace.pytree import flatten_call, unflatten_call
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.placed_tensor import Interpreter, PlacedTensor

__all__ = [
    "AdoptedTensors",
    "KeptInSurveyError",
    "across_microbatches",
    "call_with_known",
    "refuse_kept",
    "without_others",
]


class KeptInSurveyError(UnsupportedError):
    """Use of a tensor without a value, because the step kept it during its dry run."""


@contextmanager
def refuse_kept() -> Iterator[None]:
    """Context of a second dry run, which stands for the next microbatch: it must not use tensors of the first."""
    try:
        yield
    except KeptInSurveyError:
        raise across_microbatches(0, 1) from None


def across_microbatches(earlier: int, later: int) -> UnsupportedError:
    """Error for a microbatch that uses tensors of another one, whose program has not ended."""
    return UnsupportedError(
        f"A tensor of microbatch {earlier} is used in microbatch {later} of the same step. Return it from the step or "
        "log it, and use the result. A metric object in the model keeps such tensors: call its function instead "
        "(`torchmetrics.functional`)."
    )


@final
class AdoptedTensors:
    """Tensors of ended programs that one program has adopted."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[PlacedTensor, PlacedTensor]] = {}

    def adopted(self, tensor: PlacedTensor, program: Interpreter) -> PlacedTensor:
        """The tensor of ``program`` that represents ``tensor``; the same one at each call."""
        other = tensor.program
        if not other.closed:
            raise across_microbatches(other.microbatch, program.microbatch)
        _refuse_survey(tensor)
        if id(tensor) not in self._found:
            spec = dataclasses.replace(tensor.spec, requires_grad=False)
            here = None if tensor.origin is None else tensor.origin[1].detach()
            self._found[id(tensor)] = (tensor, program.bring(spec, [other.lives_on(tensor)], here))
        return self._found[id(tensor)][1]

    def clear(self) -> None:
        """Release them at the end of the program."""
        self._found.clear()


def call_with_known(
    function: Callable[..., Any], args: Any, kwargs: Any, make_known: Callable[[Sequence[PlacedTensor]], None]
) -> Any:
    """Call ``function``, outside of steps, with the values of placed tensors, which ``make_known`` broadcasts to every
    stage; collective over them.
    """
    leaves, structure = flatten_call(args, kwargs)
    kept = [leaf for leaf in leaves if isinstance(leaf, PlacedTensor)]
    for tensor in kept:
        _refuse_survey(tensor)
    make_known([tensor for tensor in kept if tensor.known is None])
    args, kwargs = unflatten_call([_known(leaf) for leaf in leaves], structure)
    return function(*args, **kwargs)


def without_others(value: Any, program: Interpreter) -> Any:
    """Value of a unit's attribute for ``program``; a tensor of another microbatch or step becomes a stale tensor."""
    if not isinstance(value, Tensor) or (isinstance(value, PlacedTensor) and value.program is program):
        return value

    def tensor() -> Tensor:
        if program.is_predicting:
            return imitate(dataclasses.replace(TensorSpec.of(value), requires_grad=False))
        if isinstance(value, PlacedTensor):
            assert value.origin is not None
            return value.origin[1].detach()
        return value

    return StaleTensor(tensor)


def _known(leaf: Any) -> Any:
    return leaf.known if isinstance(leaf, PlacedTensor) else leaf


def _refuse_survey(tensor: PlacedTensor) -> None:
    if tensor.program.is_dry_run:
        raise KeptInSurveyError(
            "A tensor is used that the step kept during its dry run, in which it had no value. Keep it in an attribute "
            "of the module, which is undone after the dry run, or return it from the step."
        )
