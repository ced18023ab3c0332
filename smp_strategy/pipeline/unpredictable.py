"""Calls with data-dependent results: their stage runs them first, and sends a description of the result to the others.

The description (shapes, constants, structure) is a small message. Other stages must know the size of every message
beforehand, so all descriptions have the same size.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Event, Value
from smp_strategy.model.trace.fake_call import Meter, tensors_of
from smp_strategy.model.trace.flops import KernelTally
from smp_strategy.model.trace.prediction import (
    Absent,
    Made,
    Prediction,
    Same,
    Unpredictable,
    ValueNeededError,
    describe,
    is_constant,
    versions_of,
)
from smp_strategy.model.trace.pytree import LeafSlot, flatten_result
from smp_strategy.model.trace.saved_tensors import counting_saved
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.isolation.draws import ProgramDraws
from smp_strategy.pipeline.local_graph import LocalGraph
from smp_strategy.pipeline.outcome import CallOutcome, InterpretedCall
from smp_strategy.pipeline.placed_tensor import Interpreter, PlacedTensor
from smp_strategy.pipeline.program_trace import ProgramTrace
from smp_strategy.pipeline.routing import Placement, SegmentId
from smp_strategy.pipeline.shared_tensors.replicated_tensors import refuse_changed_plain

__all__ = ["Described", "UnpredictableCalls", "decode", "encode"]

MESSAGE_BYTES = 1 << 15
# Larger ones are no values, but caches or parts of a model.
OBJECT_BYTES = 1 << 11
MESSAGE = TensorSpec((MESSAGE_BYTES,), (1,), torch.uint8, torch.device("cpu"), False)
"""Metadata of a description."""


class Described(NamedTuple):
    """Call that has run, with the description of its result."""

    prediction: Prediction
    """Description of the result."""
    segment: SegmentId
    """Segment that ran it."""
    values: list[Value]
    """New and changed values."""
    ran: CallOutcome | None
    """Outcome of the call; ``None`` on other stages."""


@final
class UnpredictableCalls:
    """Runs the unpredictable calls of one program.

    Args:
        stage: this rank's stage; -1 for a dry run that computes nothing.
        program_trace: trace of the program.
        graph: real tensors of the microbatch on this stage.
        draws: random streams of the program.
        exchange: moves values between stages for an event.
        run: runs a call on this stage; second argument: whether the call may draw random numbers.
    """

    def __init__(
        self,
        stage: int,
        program_trace: ProgramTrace,
        graph: LocalGraph,
        draws: ProgramDraws,
        *,
        exchange: Callable[[Placement, Sequence[PlacedTensor]], None],
        run: Callable[[InterpretedCall, bool], CallOutcome],
    ) -> None:
        self._stage = stage
        self._program_trace = program_trace
        self._graph = graph
        self._draws = draws
        self._exchange = exchange
        self._run = run

    def call(self, interpreter: Interpreter, call: InterpretedCall, why: Unpredictable) -> Described:
        """Run ``call`` on its stage and describe its result to all; collective over the stages.

        Args:
            interpreter: interpreter of the program.
            call: call with prepared arguments.
            why: reason why its result cannot be predicted.

        Raises:
            UnsupportedError: the description cannot be sent, or the call has changed a tensor that every stage has.
            ValueNeededError: the stage computes nothing.
        """
        if self._stage < 0:
            raise ValueNeededError(f"{call.name}: {why.reason}")
        if call.kind == "op":
            self._draws.count_operation()
        message = self._program_trace.value(MESSAGE)
        position = len(self._program_trace.events)
        inputs = tuple([tensor.value for tensor in call.placed])
        placement = self._program_trace.place(Event(call.kind, call.name, inputs, (message,)), is_whole=False)
        self._exchange(placement, call.placed)
        (segment,) = placement.segments
        note = PlacedTensor(interpreter, message, MESSAGE, segment)
        ran, prediction = None, None
        if self._stage in placement.stages:
            ran, prediction = self._observe(call, counts=interpreter.is_dry_run)
            note.origin = note.current = (self._graph.current, encode(call.name, prediction))
        self._draws.follow(placement.stages, call.leaves)
        self._exchange(self._program_trace.place(Event("read", "description", (message,), ()), is_whole=False), [note])
        if prediction is None:
            assert note.origin is not None
            prediction = decode(note.origin[1], call.name, why)
        refuse_changed_plain(call, prediction)
        values = [self._program_trace.value(spec) for spec in (*prediction.made, *prediction.changed.values())]
        self._program_trace.complete(position, values, prediction)
        return Described(prediction, segment, values, ran)

    def _observe(self, call: InterpretedCall, *, counts: bool) -> tuple[CallOutcome, Prediction]:
        """Run ``call`` and describe its result; its costs are counted in a dry run only."""
        leaves = [self._graph.real(leaf) for leaf in call.leaves]
        versions = versions_of(leaves)
        if not counts:
            ran = self._run(call, True)
            return ran, describe(ran.output, ran.inputs, versions, random=True)
        weights = list(tensors_of(call.callee.module).values())
        tally = KernelTally(weights)
        with counting_saved(weights) as saved_bytes, Meter(tally):
            ran = self._run(call, True)
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

    Args:
        message: Description that the stage of the call has sent.
        name: Name of the call.
        why: Reason why this stage cannot predict its result.

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
