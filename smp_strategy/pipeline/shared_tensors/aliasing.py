"""In-place changes of placed tensors, also through views and shared memory.

A tensor and its views share memory on the stage that made them, so a change through one of them reaches the others
there, unless an operation has waited for another stage in between: then autograd's graph is cut, and the changed tensor
is a copy without the history. Copies on other stages do not change either. There the change is written into a new
tensor, element by element of the memory that both share, as ``torch.func.functionalize`` does with views.
"""

import dataclasses

import torch
from torch import Tensor

from smp_strategy.distributed.torch_private import plain_functions
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Event, Value
from smp_strategy.model.trace.prediction import Alias
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.local_graph import LocalGraph
from smp_strategy.pipeline.outcome import check_tensor
from smp_strategy.pipeline.placed_tensor import Interpreter, PlacedTensor
from smp_strategy.pipeline.program_trace import ProgramTrace
from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.pipeline.shared_tensors.tensor_memory import Change

__all__ = ["follow_changes", "place_plain", "share_memory", "take_change"]


def share_memory(tensor: PlacedTensor, other: Tensor, alias: Alias) -> None:
    """Share the memory of ``other``, of which ``tensor`` is a view or a detached copy."""
    if not isinstance(other, PlacedTensor):
        tensor.memory.is_plain = True
        return
    if other.memory.whole is None:
        other.memory.whole = other.spec
    tensor.memory, tensor.version, tensor.copy = other.memory, other.memory.version, other.copy
    tensor.offset = None if other.offset is None or alias.offset is None else other.offset + alias.offset
    if alias.is_view:
        tensor.family = other.family


def take_change(
    tensor: PlacedTensor, value: Value, spec: TensorSpec, where: SegmentId, here: tuple[int, Tensor] | None
) -> None:
    """Turn ``tensor`` into the result of an in-place operation; ``here`` is the number of the segment that ran it, and
    the real tensor, on its stage.
    """
    if spec.size != tensor.spec.size:
        raise UnsupportedError(
            f"An in-place operation changed the shape of a placed tensor from {list(tensor.spec.size)} to "
            f"{list(spec.size)}. Use the operation that returns a new tensor."
        )
    _set_requires_grad(tensor, spec)
    tensor.value, tensor.spec, tensor.born = value, spec, where
    tensor.origin = tensor.current = here
    memory = tensor.memory
    memory.version += 1
    tensor.version = memory.version
    if memory.whole is not None:
        is_all = tensor.offset == 0 and (spec.size, spec.stride) == (memory.whole.size, memory.whole.stride)
        change = Change(
            memory.version, _standing(tensor), tensor.family, tensor.offset, tensor.copy, torch.is_grad_enabled()
        )
        memory.changes = [change] if is_all else [*memory.changes, change]


def follow_changes(tensor: PlacedTensor, program_trace: ProgramTrace, stage: int) -> None:
    """Bring ``tensor`` up to date after changes that were made through others with the same memory.

    Raises:
        UnsupportedError: a change cannot be written into the tensor, which does not share the real memory.
    """
    for change in tensor.memory.changes:
        if change.version > tensor.version:
            if change.result.born == tensor.born and change.copy is tensor.copy:
                _note(tensor, change, program_trace, stage)
            else:
                _write(tensor, change, program_trace)
    tensor.version = tensor.memory.version


def _note(tensor: PlacedTensor, change: Change, program_trace: ProgramTrace, stage: int) -> None:
    """Note that the real tensor has changed with the memory."""
    spec, changed, where = tensor.spec, change.result.value, change.result.born
    if change.family == tensor.family:
        spec = dataclasses.replace(spec, requires_grad=spec.requires_grad or changed.requires_grad)
    value = program_trace.value(spec)
    inputs = (tensor.value, changed) if change.family == tensor.family else (tensor.value,)
    placement = program_trace.place(Event("op", "alias", inputs, (value,)))
    assert not placement.moves, "views and their base are on one stage"
    _set_requires_grad(tensor, spec)
    tensor.value, tensor.spec = value, spec
    if where.stage == stage:
        assert tensor.origin is not None
        check_tensor("alias", spec, tensor.origin[1])
    else:
        tensor.origin = tensor.current = None


def _write(tensor: PlacedTensor, change: Change, program_trace: ProgramTrace) -> None:
    """Write the change into a new tensor, which ``tensor`` then stands for."""
    new, is_same = change.result, change.family == tensor.family
    repeats = any(size > 1 and stride == 0 for size, stride in zip(tensor.spec.size, tensor.spec.stride, strict=True))
    is_lost = program_trace.has_ended or repeats or (tensor.spec.requires_grad and not is_same)
    if tensor.offset is None or change.offset is None or is_lost:
        raise UnsupportedError(
            f"A tensor of shape {list(tensor.spec.size)} shares its memory with one that was changed in place on stage "
            f"{new.born.stage}, but stands itself on stage {tensor.born.stage} or was made earlier there, so the "
            "change does not reach it. Use an operation that returns a new tensor."
        )
    places = _common_places(tensor.spec, tensor.offset, new.spec, change.offset)
    if places is None:
        return
    with torch.set_grad_enabled(change.is_recorded):
        made = tensor.program.operation("alias", _merged, (_standing(tensor), new, places, is_same), {})
    _set_requires_grad(tensor, made.spec)
    tensor.value, tensor.spec, tensor.born = made.value, made.spec, made.born
    tensor.origin, tensor.current, tensor.copy = made.origin, made.current, object()


def _common_places(spec: TensorSpec, offset: int, other: TensorSpec, begin: int) -> Tensor | None:
    """For each element of a tensor the number of the element of another in the same place, or -1; ``None``: all -1."""
    if not (spec.numel and other.numel):
        return None
    extent = max(_end(spec, offset), _end(other, begin))
    numbers = torch.full((extent,), -1, device="cpu")
    numbers.as_strided(other.size, other.stride, begin).copy_(torch.arange(other.numel, device="cpu").view(other.size))
    found = numbers.as_strided(spec.size, spec.stride, offset)
    return found.clone() if bool((found >= 0).any()) else None


def _end(spec: TensorSpec, offset: int) -> int:
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(spec.size, spec.stride, strict=True))


def _merged(old: Tensor, new: Tensor, places: Tensor, keeps_history: bool) -> Tensor:
    """``old`` with the elements of ``new`` where ``places`` has their numbers, with the strides of ``old``."""
    places = places.to(old.device)
    elements = (new if keeps_history else new.detach()).flatten()[places.clamp(min=0)]
    return old.new_empty_strided(old.size(), old.stride()).copy_(torch.where(places >= 0, elements, old))


def _standing(tensor: PlacedTensor) -> PlacedTensor:
    """The value that ``tensor`` has now, as a tensor with a memory of its own."""
    made = PlacedTensor(tensor.program, tensor.value, tensor.spec, tensor.born)
    made.origin, made.current = tensor.origin, tensor.current
    return made


def _set_requires_grad(tensor: PlacedTensor, spec: TensorSpec) -> None:
    with plain_functions():
        tensor.requires_grad_(spec.requires_grad)


def place_plain(
    tensor: Tensor, interpreter: Interpreter, program_trace: ProgramTrace, graph: LocalGraph, *, computes: bool
) -> PlacedTensor:
    """Turn a plain tensor, which all stages hold and an operation is about to change, into a placed one: the same
    object, since the user refers to it.
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
