"""Check of a call's actual result against its prediction, and assembly of results.

Predictions are made from metadata. They can be wrong if the result depends on something else (tensor values, the state
of an object); the stage that ran the call notices this before any code uses the result.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import Callee, Made, Prediction, Same, is_constant
from smp_strategy.model.trace.pytree import flatten_result
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.segments import start_of_gradient

__all__ = ["CallOutcome", "InterpretedCall", "assemble", "check_tensor", "made_tensors"]


class InterpretedCall(NamedTuple):
    """Call of a unit, or of an operation of the glue."""

    kind: Literal["unit", "op"]
    name: str
    callee: Callee
    leaves: list[Any]
    """Flattened arguments."""
    structure: Any
    placed: list[PlacedTensor]
    """Placed tensors among them."""


class CallOutcome(NamedTuple):
    """Outcome of a call that ran on this stage."""

    inputs: list[Any]
    """Flattened arguments."""
    output: Any


def made_tensors(
    name: str, prediction: Prediction, inputs: Sequence[Any], output: Any
) -> tuple[list[Any], list[Tensor]]:
    """Flatten the result of a call and compare it with the prediction.

    Args:
        prediction: prediction that the other stages use.
        inputs: flattened arguments.

    Returns:
        All flattened outputs, and the new tensors among them.

    Raises:
        UnsupportedError: the result is not as predicted.
    """
    flat = [output] if isinstance(output, Tensor) else flatten_result(output, inputs)[0]
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
                # The call took a path without weights (stochastic depth, say), which no prediction can know: the other
                # stages expect a gradient to flow, so it is given a graph, in which the gradient ends.
                leaf = start_of_gradient(leaf)
            check_tensor(name, predicted.spec, leaf)
            made.append(leaf)
    return flat, made


def check_tensor(name: str, spec: TensorSpec, tensor: Tensor) -> None:
    """Compare a tensor with the metadata that other stages expect.

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
    """Assemble the return value of a call, of new tensors (``results``), its arguments (``leaves``), and for the rest
    its flattened outputs (``constants``).
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
