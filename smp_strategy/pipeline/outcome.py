"""What a call really returned, held against what the other stages were told.

Predictions are made from metadata. Where the result depends on something else (tensor values, the state of an
object), they can be wrong; this is noticed on the stage that ran the call, before anything goes on with it.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import Callee, Made, Prediction, Same, is_constant
from smp_strategy.model.trace.pytree import flatten
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.segments import start_of_gradient

__all__ = ["CallOutcome", "InterpretedCall", "assemble", "check_tensor", "made_tensors"]


class InterpretedCall(NamedTuple):
    """A call of a unit, or of an operation of the glue."""

    kind: Literal["unit", "op"]
    name: str
    callee: Callee
    leaves: list[Any]
    """Its flattened arguments."""
    structure: Any
    """Structure of the arguments, to put them together again."""
    placed: list[PlacedTensor]
    """Placed tensors among them."""


class CallOutcome(NamedTuple):
    """A call that happened on this stage."""

    inputs: list[Any]
    """Its flattened arguments."""
    output: Any
    """What it returned."""


def made_tensors(
    name: str, prediction: Prediction, inputs: Sequence[Any], output: Any
) -> tuple[list[Any], list[Tensor]]:
    """Take the result of a call apart.

    Args:
        name: of the call.
        prediction: what the other stages go by.
        inputs: its flattened arguments.
        output: what the call returned.

    Returns:
        All flattened outputs, and those tensors among them that the call made.

    Raises:
        UnsupportedError: the result is not as predicted.
    """
    flat = [output] if isinstance(output, Tensor) else flatten(output)[0]
    same_length = len(flat) == len(prediction.outputs)
    if not same_length or not all(_agrees(leaf, p, inputs) for leaf, p in zip(flat, prediction.outputs, strict=True)):
        raise UnsupportedError(
            f"`{name}` returned {_shown(flat)} where its dry run returned {_shown(prediction.outputs)}: what it "
            "returns depends on tensor values or on the state of an object (a cache, say: `use_cache=False` does "
            "without), so other stages cannot know it."
        )
    made: list[Tensor] = []
    for leaf, predicted in zip(flat, prediction.outputs, strict=True):
        if isinstance(predicted, Made):
            if predicted.spec.requires_grad and not leaf.requires_grad:
                # A path without weights, as in a block that skips itself by chance: the gradient ends here.
                leaf = start_of_gradient(leaf)
            check_tensor(name, predicted.spec, leaf)
            made.append(leaf)
    return flat, made


def check_tensor(name: str, spec: TensorSpec, tensor: Tensor) -> None:
    """Compare what other stages expect with what is there.

    Raises:
        UnsupportedError: they differ.
    """
    if tensor.shape != spec.size or tensor.dtype != spec.dtype or tensor.requires_grad != spec.requires_grad:
        raise UnsupportedError(
            f"`{name}` returned {TensorSpec.of(tensor)}, but other stages expect {spec} from its dry run: what it "
            "returns depends on tensor values or on the state of an object (a cache, say: `use_cache=False` does "
            "without)."
        )


def _agrees(found: Any, predicted: Any, inputs: Sequence[Any]) -> bool:
    """Whether an output is of the kind that the other stages expect."""
    if isinstance(predicted, Made):
        return isinstance(found, Tensor)
    if isinstance(predicted, Same):
        return found is inputs[predicted.leaf]
    if is_constant(predicted):
        return type(found) is type(predicted) and (found == predicted or found != found)
    return True


def _shown(outputs: Sequence[Any]) -> str:
    kinds = [_kind(leaf) for leaf in outputs]
    return kinds[0] if len(kinds) == 1 else f"{len(kinds)} values ({', '.join(kinds)})"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Same):
        return "one of its arguments"
    return repr(leaf) if is_constant(leaf) else "a tensor" if isinstance(leaf, Tensor | Made) else type(leaf).__name__


def assemble(prediction: Prediction, results: Sequence[Any], leaves: Sequence[Any], constants: Sequence[Any]) -> Any:
    """What a call returns, put together.

    Args:
        prediction: of the call.
        results: the new tensors in it.
        leaves: what it was given.
        constants: the other parts of the result, among ``prediction.outputs``.
    """
    if prediction.is_bare and results:
        return results[0]
    fresh = iter(results)
    flat = []
    for output, constant in zip(prediction.outputs, constants, strict=True):
        if isinstance(output, Made):
            flat.append(next(fresh))
        elif isinstance(output, Same):
            flat.append(leaves[output.leaf])
        else:
            flat.append(constant)
    return flat[0] if prediction.is_bare else pytree.tree_unflatten(flat, prediction.structure)
