"""In-place changes of placed tensors, also through views and shared memory.

A tensor and its views share memory on the stage that made them, so a change through one of them reaches the others
there. Copies of them on other stages do not change, and are out of date.
"""

import dataclasses

import torch
from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Event, Value
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.local_graph import LocalGraph
from smp_strategy.pipeline.outcome import check_tensor
from smp_strategy.pipeline.placed_tensor import Interpreter, PlacedTensor
from smp_strategy.pipeline.program_trace import ProgramTrace
from smp_strategy.pipeline.routing import SegmentId

__all__ = ["follow_change", "place_plain", "share_memory", "take_change"]


def share_memory(tensor: PlacedTensor, other: Tensor, *, is_view: bool) -> None:
    """Share the memory of ``other``, of which ``tensor`` is a view or a detached copy."""
    if not isinstance(other, PlacedTensor):
        tensor.memory.is_plain = True
        return
    tensor.memory, tensor.version = other.memory, other.memory.version
    if is_view:
        tensor.family = other.family


def take_change(
    tensor: PlacedTensor, value: Value, spec: TensorSpec, where: SegmentId, here: tuple[int, Tensor] | None
) -> None:
    """Turn ``tensor`` into the result of an in-place operation.

    Args:
        tensor: placed tensor that was changed.
        value, spec: value and metadata of the result.
        where: segment of the operation.
        here: number of this segment and the real tensor, on the stage that ran the operation.
    """
    if spec.size != tensor.spec.size:
        raise UnsupportedError(
            f"An in-place operation changed the shape of a placed tensor from {list(tensor.spec.size)} to "
            f"{list(spec.size)}. Use the operation that returns a new tensor."
        )
    with torch._C.DisableTorchFunctionSubclass():
        tensor.requires_grad_(spec.requires_grad)
    tensor.value, tensor.spec, tensor.born = value, spec, where
    tensor.memory.version += 1
    tensor.memory.changed = (value, where, tensor.family)
    tensor.version = tensor.memory.version
    tensor.origin = tensor.current = here


def follow_change(tensor: PlacedTensor, program_trace: ProgramTrace, stage: int) -> None:
    """Bring ``tensor`` up to date after a change that was made through a view.

    Args:
        tensor: placed tensor that is out of date.
        program_trace: trace of its program.
        stage: this rank's stage.

    Raises:
        UnsupportedError: the tensor is on another stage than the change, or was made there in another segment.
    """
    assert tensor.memory.changed is not None
    changed, where, family = tensor.memory.changed
    if where != tensor.born:
        raise UnsupportedError(
            f"A tensor of shape {list(tensor.spec.size)} shares its memory with one that was changed in place on "
            f"stage {where.stage}, but stands itself on stage {tensor.born.stage} or was made earlier there, so "
            "the change does not reach it. Use an operation that returns a new tensor."
        )
    spec = tensor.spec
    if family == tensor.family:
        spec = dataclasses.replace(spec, requires_grad=spec.requires_grad or changed.requires_grad)
    value = program_trace.value(spec)
    inputs = (tensor.value, changed) if family == tensor.family else (tensor.value,)
    placement = program_trace.place(Event("op", "alias", inputs, (value,)))
    assert not placement.moves, "views and their base are on one stage"
    with torch._C.DisableTorchFunctionSubclass():
        tensor.requires_grad_(spec.requires_grad)
    tensor.value, tensor.spec, tensor.version = value, spec, tensor.memory.version
    if where.stage == stage:
        assert tensor.origin is not None
        check_tensor("alias", spec, tensor.origin[1])
    else:
        tensor.origin = tensor.current = None


def place_plain(
    tensor: Tensor, interpreter: Interpreter, program_trace: ProgramTrace, graph: LocalGraph, *, computes: bool
) -> PlacedTensor:
    """Turn a plain tensor, which all stages hold and an operation is about to change, into a placed one.

    Args:
        tensor: plain tensor; becomes the placed tensor itself, since the user refers to it.
        interpreter: interpreter of the program.
        program_trace: trace of the program.
        graph: real tensors of the microbatch on this stage.
        computes: whether this stage has values; false in a dry run.
    """
    spec = TensorSpec.of(tensor)
    # Another object: the tensor itself is about to become something else. With a history it is no view, since views
    # keep their base.
    real = graph.real(tensor.detach() if tensor.grad_fn is None else tensor.clone())
    value, home = program_trace.given(spec, range(program_trace.num_stages))
    tensor.__class__ = PlacedTensor
    assert isinstance(tensor, PlacedTensor)
    tensor.stand_for(interpreter, value, spec, home)
    if computes:
        tensor.origin = tensor.current = (graph.current, real)
    return tensor
