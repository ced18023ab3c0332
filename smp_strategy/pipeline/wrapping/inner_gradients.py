"""``torch.autograd.grad`` in the step: gradient penalties, derivatives of a network with respect to its inputs.

It runs as one operation of the glue, on the stage that has the graph. All of the graph between the inputs and the
outputs must lie in one segment: with several stages, a model that is differentiated inside of the step has to be a unit
on one of them. A second backward through the result is the ordinary one of the segment.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import guard_of
from smp_strategy.model.trace.events import Event
from smp_strategy.pipeline.routing import Placement, SegmentId
from smp_strategy.pipeline.split_backward import explored

__all__ = ["gradients_in_step"]

Placed = Any
"""A placed tensor, whose module imports this one."""


def gradients_in_step(
    program: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *given: Any, **options: Any
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` of or by placed tensors, for the interpreter ``program``.

    Raises:
        UnsupportedError: the graph is on several stages, or is that of parameters that no rank has whole.
    """
    outputs, inputs = _several(outputs), _several(inputs)
    options.update(zip(("retain_graph", "create_graph", "only_inputs", "allow_unused"), given, strict=False))
    options.pop("only_inputs", None)
    _check_inputs(program, inputs)
    is_spread = not program.closed and program.program_trace.num_stages > 1
    where = None
    if is_spread:
        _refuse_glue(program, inputs)
        where = _segment_of(program.program_trace.events, outputs, inputs)
    arguments = (outputs, inputs, None if grad_outputs is None else _several(grad_outputs))
    result = program.operation("grad", _made_up if program.is_dry_run else _gradients, arguments, options)
    if where is not None and where not in program.program_trace.events[-1][1].segments:
        _refuse_spread()
    return cast(tuple[Tensor | None, ...], result)


def _several(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None] | None, **options: Any
) -> tuple[Tensor | None, ...]:
    """The operation itself; on fake tensors, which have no graph, its prediction."""
    if any(isinstance(each, FakeTensor) for each in inputs):
        return _made_up(outputs, inputs, grad_outputs, **options)
    return torch.autograd.grad(outputs, inputs, grad_outputs, **options)


def _made_up(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None] | None, **options: Any
) -> tuple[Tensor, ...]:
    """Tensors of the metadata of gradients, in a survey: its graphs are freed at once."""
    if isinstance(inputs[0], FakeTensor) and options.get("allow_unused") and not options.get("materialize_grads"):
        raise RuntimeError("the graph tells which gradients are None")
    several: tuple[int, ...] = ()
    if options.get("is_grads_batched") and grad_outputs is not None and grad_outputs[0] is not None:
        several = (len(grad_outputs[0]),)
    found = [each.detach().new_zeros((*several, *each.shape)) for each in inputs]
    return tuple(each.requires_grad_(bool(options.get("create_graph"))) for each in found)


def _check_inputs(program: Any, inputs: Sequence[Any]) -> None:
    """Refuse inputs whose graph is on several ranks."""
    for each in inputs:
        if isinstance(each, nn.Parameter) and (program.parameters_refused or guard_of(each) is not None):
            reason = program.parameters_refused or "between uses its values are in shards"
            raise UnsupportedError(
                f"`torch.autograd.grad` in the step asks for the gradient of a parameter of shape {list(each.shape)}: "
                f"{reason}. Return the loss, whose gradients the optimizer gets; or move the computation into an "
                "nn.Module that is a unit."
            )


def _refuse_glue(program: Any, inputs: Sequence[Any]) -> None:
    """Refuse plain tensors that reach a unit by way of the graph of the glue, which is cut from that of a segment."""
    plain = {id(each) for each in inputs if not getattr(each, "is_placed", False)}
    if not plain:
        return
    exports = [export.edge.node for export in program.graph.glue.exports.values()]
    leaves = {id(variable) for node in explored(exports) if (variable := getattr(node, "variable", None)) is not None}
    if not plain.isdisjoint(leaves) or any(id(each) in plain and each.grad_fn is not None for each in inputs):
        _refuse_spread()


def _segment_of(
    events: Sequence[tuple[Event, Placement]], outputs: Sequence[Placed], inputs: Sequence[Placed]
) -> SegmentId:
    """The segment that has the graph between ``inputs`` and ``outputs``, which stages find alike.

    Raises:
        UnsupportedError: several segments have parts of it.
    """
    below = {each.value.id for each in inputs if getattr(each, "is_placed", False)}
    # Tensors that every stage has may enter the graph anywhere.
    enters_anywhere = len(below) < len(set(map(id, inputs)))
    for event, _ in events:
        if not below.isdisjoint(value.id for value in event.inputs):
            below.update(value.id for value in event.outputs if value.requires_grad)
    made = [each for each in outputs if getattr(each, "is_placed", False)]
    above = {each.value.id for each in made}
    segments = {each.born for each in made}
    for event, placement in reversed(events):
        is_between = enters_anywhere or any(value.id in below for value in event.inputs)
        if is_between and not above.isdisjoint(value.id for value in event.outputs):
            above.update(value.id for value in event.inputs if value.requires_grad)
            segments.update(placement.segments)
    if len(segments) != 1:
        _refuse_spread()
    return segments.pop()


def _refuse_spread() -> NoReturn:
    raise UnsupportedError(
        "`torch.autograd.grad` in the step: parts of the graph between its inputs and outputs are on several pipeline "
        "stages. Put the modules that are differentiated into one that is a unit (`smp_strategy.unit(self.critic)`), "
        "call it with the tensors whose gradients are asked for, and give it these as they are."
    )
