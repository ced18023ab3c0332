"""What a call really returned, held against what the other stages were told.

Predictions are made from metadata. Where the result depends on something else (tensor values, the state of an
object), they can be wrong; this is noticed on the stage that ran the call, before anything goes on with it.

Where there is no prediction, the stage that ran the call tells the others: the description is a small message.
"""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import Absent, Made, Prediction, Same, is_constant
from smp_strategy.model.trace.pytree import flatten
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.segments import start_of_gradient

__all__ = ["MESSAGE", "CallOutcome", "assemble", "check_tensor", "decode", "encode", "made_tensors"]

MESSAGE_BYTES = 1 << 15
MESSAGE = TensorSpec((MESSAGE_BYTES,), (1,), torch.uint8, torch.device("cpu"), False)
"""Metadata of a description: other stages must know the size of every message beforehand."""


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


class _LeafSlot:
    """Stands for a leaf. A packed sequence, which is a named tuple, asks where its parts are."""

    device = torch.device("cpu")


def encode(name: str, prediction: Prediction) -> Tensor:
    """The message that describes the result of the call ``name``.

    Raises:
        UnsupportedError: it cannot be sent.
    """
    outputs = tuple(_sendable(output) for output in prediction.outputs)
    # Containers can be pickled, pytree's description of them only with a warning.
    skeleton = pytree.tree_unflatten([_LeafSlot()] * len(outputs), prediction.structure)
    try:
        message = pickle.dumps((skeleton, outputs, prediction.changed, prediction.aliases))
    except Exception as error:
        raise UnsupportedError(
            f"What `{name}` returns depends on tensor values, and its description cannot be sent to the other stages: "
            f"{error}. Return tensors, numbers and strings in tuples, lists, dicts or classes of a module."
        ) from error
    if len(message) > MESSAGE_BYTES:
        raise UnsupportedError(
            f"What `{name}` returns depends on tensor values, and describing it to the other stages takes "
            f"{len(message)} bytes, more than {MESSAGE_BYTES}. Return fewer objects."
        )
    padded = bytearray(message.ljust(MESSAGE_BYTES, b"\0"))
    return torch.frombuffer(padded, dtype=torch.uint8)


def decode(message: Tensor) -> Prediction:
    """What :func:`encode` was given on another stage of this run."""
    skeleton, outputs, changed, aliases = pickle.loads(message.numpy().tobytes())
    _, structure = flatten(skeleton)
    return Prediction(outputs=outputs, structure=structure, changed=changed, aliases=aliases, random=True)


def _sendable(output: Any) -> Any:
    if isinstance(output, (Made, Same)) or is_constant(output):
        return output
    return Absent(type(output).__name__)


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
