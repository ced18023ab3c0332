"""Backward, piece by piece: where a stage's graph is cut, and what is remembered at each cut.

A microbatch's graph on a stage is cut where a value enters a segment: received from another stage, or made by an
earlier segment of this stage. The segment computes on a copy that has no history (an *import*); the segment that
made the value remembers that it left (an *export*). Backward of a segment starts from its exports, with the summed
gradients of their users, and ends at its imports, whose gradients are then sent to where the values came from.

The glue's own graph (say ``self.cls_token.expand(...)``) exists on every stage and is no segment's: it is cut in the
same way and its backward runs once, after the last segment of the microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smp_strategy.distributed.torch_modes import recording
from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["Export", "Import", "Remote", "Segment", "cut_off", "edge_of", "enter", "import_at", "start_of_gradient"]


@final
@dataclass(frozen=True, slots=True)
class Remote:
    """A use of a value on another stage."""

    stage: int
    tag: int
    """Message tag of the value; its gradient travels back under the next number."""
    spec: TensorSpec
    """Metadata of the value, which is that of its gradient."""


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where the backward of ``tensor`` begins."""
    # It takes a view of a tensor that an autograd Function has made, whose node, not being Python's, holds the graph.
    # A subclass of Tensor would make that view in its own way, and its node may be one of Python's again.
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(tensor)


@final
@dataclass(eq=False, slots=True)
class Export:
    """A value that left the segment that made it."""

    value: int
    value_or_edge: Tensor | GradientEdge
    """The value; or, when nobody will use it any more, where its backward begins."""
    uses: "list[Remote | Import]" = field(default_factory=list)
    """In the order of the program."""

    @property
    def tensor(self) -> Tensor:
        """The value, for another use."""
        assert isinstance(self.value_or_edge, Tensor), "a value of a program that has ended is used"
        return self.value_or_edge

    @property
    def edge(self) -> GradientEdge:
        """Where its backward begins."""
        found = self.value_or_edge
        return edge_of(found) if isinstance(found, Tensor) else found

    def let_go(self) -> None:
        """There will be no more uses: the value need not stay in memory."""
        self.value_or_edge = self.edge


@final
@dataclass(eq=False, slots=True)
class Import:
    """A value that entered a segment; its gradient is caught here."""

    value: int
    source: Remote | None
    """Where it was received from; ``None`` for a value of this stage. No way back to the export: the two would form a
    cycle, and activations would live until the garbage collector finds it."""
    grad: Tensor | None = None


@final
@dataclass(eq=False, slots=True)
class Segment:
    """What crosses the border of one segment of one microbatch."""

    index: int
    exports: dict[int, Export] = field(default_factory=dict)
    """By value."""
    imports: list[Import] = field(default_factory=list)

    def export(self, value: int, tensor: Tensor) -> Export:
        """The record of ``value`` leaving this segment, made at its first use elsewhere."""
        if value not in self.exports:
            self.exports[value] = Export(value, tensor)
        return self.exports[value]


class _Enter(torch.autograd.Function):
    """Gives a tensor a place in the graph where its gradient is caught.

    The tensor comes out of a callable so that autograd takes it for newly made: it is neither a leaf nor a view, and
    the code behind may change it in place.
    """

    # Not what `watched_entrances` puts into its place: no placed tensor comes here.
    apply = vars(torch.autograd.Function)["apply"]

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor], record: Import) -> Tensor:
        ctx.record = record
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.record.grad = grads[0]
        return None, None, None


def enter(tensor: Tensor, record: Import) -> Tensor:
    """``tensor``, without its history, as the start of a graph whose gradient ends up in ``record``."""
    with recording():
        anchor = torch.zeros((), requires_grad=True, device=tensor.device)
        return _Enter.apply(anchor, tensor.detach, record)


def import_at(node: Any) -> Import | None:
    """The import whose gradient is caught at ``node`` of the graph, if one is."""
    return node.record if type(node) is _Enter._backward_cls else None  # type: ignore[attr-defined]


def cut_off(tensor: Tensor) -> Tensor:
    """``tensor`` without its history, which is freed, but in a graph as before."""
    return start_of_gradient(tensor) if tensor.requires_grad else tensor


def start_of_gradient(tensor: Tensor) -> Tensor:
    """``tensor`` in a graph that ends here: it requires a gradient, and nobody gets it."""
    return enter(tensor, Import(-1, None))
