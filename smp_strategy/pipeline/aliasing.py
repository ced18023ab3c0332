"""In-place changes that reach placed tensors through views and shared memory.

A tensor and its views share memory on the stage that made them, so a change through one of them reaches the others
there. Copies of them on other stages do not change, and are out of date.
"""

import dataclasses

from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Event
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.local_graph import LocalGraph
from smp_strategy.pipeline.outcome import check_tensor
from smp_strategy.pipeline.placed_tensor import Interpreter, PlacedTensor
from smp_strategy.pipeline.program_trace import ProgramTrace

__all__ = ["follow_change", "place_plain"]


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
    tensor.refresh(value, spec)
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
    # An alias: the tensor itself is about to become something else.
    real = graph.real(tensor.detach() if tensor.grad_fn is None else tensor.view_as(tensor))
    value, home = program_trace.given(spec, range(program_trace.num_stages))
    placed = PlacedTensor.from_plain(tensor, interpreter, value, spec, home)
    if computes:
        placed.origin = placed.current = (graph.current, real)
    return placed
