"""Calls with data-dependent results: the stage that runs one describes its result to the others.

The description (shapes, constants, structure) is a small message. Other stages must know the size of every message
beforehand, so all descriptions have the same size.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.fake_call import Meter, tensors_of
from smp_strategy.model.trace.flops import KernelTally
from smp_strategy.model.trace.prediction import (
    Absent,
    Made,
    Prediction,
    Same,
    Unpredictable,
    describe,
    is_constant,
    versions_of,
)
from smp_strategy.model.trace.pytree import LeafSlot, flatten_result
from smp_strategy.model.trace.saved_tensors import counting_saved
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.local_graph import LocalGraph
from smp_strategy.pipeline.outcome import CallOutcome, InterpretedCall

__all__ = ["MESSAGE", "decode", "encode", "observed"]

MESSAGE_BYTES = 1 << 15
# Larger ones are no values, but caches or parts of a model.
OBJECT_BYTES = 1 << 11
MESSAGE = TensorSpec((MESSAGE_BYTES,), (1,), torch.uint8, torch.device("cpu"), False)
"""Metadata of a description."""


def observed(
    call: InterpretedCall, run: Callable[[InterpretedCall, bool], CallOutcome], graph: LocalGraph, *, counts: bool
) -> tuple[CallOutcome, Prediction]:
    """Run ``call`` and describe its result; its costs are counted if ``counts``, as in a dry run."""
    leaves = [graph.real(leaf) for leaf in call.leaves]
    versions = versions_of(leaves)
    if not counts:
        ran = run(call, True)
        return ran, describe(ran.output, ran.inputs, versions, random=True)
    weights = list(tensors_of(call.callee.module).values())
    tally = KernelTally(weights)
    with counting_saved(weights) as saved_bytes, Meter(tally):
        ran = run(call, True)
    prediction = describe(
        ran.output, ran.inputs, versions, random=True, effort=tally.efforts, saved_bytes=saved_bytes()
    )
    return ran, prediction


def encode(name: str, prediction: Prediction) -> Tensor:
    """Encode the description of the result of the call ``name`` as a message.

    Raises:
        UnsupportedError: it cannot be sent.
    """
    outputs = tuple(_sendable(output) for output in prediction.outputs)
    # Containers can be pickled, pytree's description of them only with a warning.
    skeleton = pytree.tree_unflatten([LeafSlot()] * len(outputs), prediction.structure)
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


def decode(message: Tensor, name: str, why: Unpredictable) -> Prediction:
    """Inverse of :func:`encode`, for messages of another stage of this run.

    Raises:
        UnsupportedError: the stage of the call has sent something else.
    """
    try:
        skeleton, outputs, changed, aliases = pickle.loads(message.numpy().tobytes())
    except Exception as error:
        raise UnsupportedError(
            f"What `{name}` returns cannot be predicted on this rank ({why.reason}), but the rank that runs it has "
            "predicted it, and so has sent no description. If that is an error of this rank alone, repair it; else "
            "the ranks run different code."
        ) from error
    _, structure = flatten_result(skeleton)
    return Prediction(outputs=outputs, structure=structure, changed=changed, aliases=aliases, random=True)


def _sendable(output: Any) -> Any:
    if isinstance(output, (Made, Same)) or is_constant(output):
        return output
    message = io.BytesIO()
    try:
        _WithoutTensors(message).dump(output)
    except Exception:
        return Absent(type(output).__name__)
    return output if message.tell() <= OBJECT_BYTES else Absent(type(output).__name__)


class _WithoutTensors(pickle.Pickler):
    """Pickles objects that are the same on every stage: the transform of a distribution, a name, a setting."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (Tensor, nn.Module)):
            raise TypeError
        return NotImplemented
