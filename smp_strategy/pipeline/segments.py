"""Autograd graph of a microbatch on a stage, cut into segments, with the imports and exports at each cut.

The graph is cut at every value that enters a segment ([Note: segments] in ``routing.py``): received from another stage,
or made by an earlier segment of this stage. The segment computes on a copy without history (an *import*); the segment
that made the value notes that it left (an *export*). Backward of a segment starts from its exports, with the summed
gradients of their uses, and ends at its imports, whose gradients are then sent to the stages that made the values.

The glue's own graph (say ``self.cls_token.expand(...)``) exists on every stage and belongs to no segment: it is cut in
the same way and its backward runs once, after the last segment of the microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smp_strategy.distributed.torch_modes import recording
from smp_strategy.distributed.torch_private import plain_functions
from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["Export", "Import", "Remote", "Segment", "cut_off", "edge_of", "enter", "import_at", "start_of_gradient"]


@final
@dataclass(frozen=True, slots=True)
class Remote:
    """Use of a value on another stage."""

    stage: int
    tag: int
    """Message tag of the value; its gradient has the next number."""
    spec: TensorSpec
    """Metadata of the value and of its gradient."""


def edge_of(tensor: Tensor) -> GradientEdge:
    """Gradient edge at which the backward of ``tensor`` begins."""
    # It takes a view of a tensor that an autograd Function has made, whose node, not being Python's, holds the graph.
    # A subclass of Tensor would make that view in its own way, and its node may be one of Python's again.
    with plain_functions():
        return get_gradient_edge(tensor)


@final
@dataclass(eq=False, slots=True)
class Export:
    """Value that left the segment that made it."""

    value: int
    value_or_edge: Tensor | GradientEdge
    """The value; after its last use, only the edge at which its backward begins."""
    uses: "list[Remote | Import]" = field(default_factory=list)
    """Uses in program order."""

    @property
    def tensor(self) -> Tensor:
        """The value, for a further use."""
        assert isinstance(self.value_or_edge, Tensor), "a value of a program that has ended is used"
        return self.value_or_edge

    @property
    def edge(self) -> GradientEdge:
        """Edge at which its backward begins."""
        found = self.value_or_edge
        return edge_of(found) if isinstance(found, Tensor) else found

    def let_go(self) -> None:
        """Free the value after its last use; the edge stays."""
        self.value_or_edge = self.edge


@final
@dataclass(eq=False, slots=True)
class Import:
    """Value that entered a segment; its gradient is caught here."""

    value: int
    source: Remote | None
    """Sender of the value; ``None`` for a value of this stage. There is no reference to the export: the two would form
    a cycle, and activations would live until the garbage collector finds it."""
    grad: Tensor | None = None
    """The gradient, once backward has reached the import."""


@final
@dataclass(eq=False, slots=True)
class Segment:
    """Imports and exports of one segment of one microbatch."""

    index: int
    """Number of the segment; -1 for the glue."""
    exports: dict[int, Export] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)
    """Imports in program order."""

    def export(self, value: int, tensor: Tensor) -> Export:
        """The export of ``value``, made at its first use elsewhere."""
        if value not in self.exports:
            self.exports[value] = Export(value, tensor)
        return self.exports[value]


class _Enter(torch.autograd.Function):
    """Autograd Function that catches the gradient of the tensor that it returns.

    The tensor comes out of a callable so that autograd takes it for newly made: it is neither a leaf nor a view, and
    the following code may change it in place.
    """

    # Torch's own, as `watched_entrances` replaces `apply` in a step: no placed tensor comes here.
    apply = vars(torch.autograd.Function)["apply"]

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor], imported: Import) -> Tensor:
        ctx.imported = imported
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.imported.grad = grads[0]
        return None, None, None


def enter(tensor: Tensor, imported: Import) -> Tensor:
    """Return ``tensor`` without its history, as the start of a graph whose gradient is caught in ``imported``."""
    with recording():
        # The only input of the Function that requires a gradient; without one autograd would record no node.
        anchor = torch.zeros((), requires_grad=True, device=tensor.device)
        return _Enter.apply(anchor, tensor.detach, imported)


def import_at(node: Any) -> Import | None:
    """The import whose gradient is caught at ``node`` of the graph, if any."""
    return node.imported if type(node) is _Enter._backward_cls else None  # type: ignore[attr-defined]


def cut_off(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without its history; it still requires a gradient if it did."""
    return start_of_gradient(tensor) if tensor.requires_grad else tensor


def start_of_gradient(tensor: Tensor) -> Tensor:
    """Return ``tensor`` at the start of a new graph: it requires a gradient, which is dropped."""
    return enter(tensor, Import(-1, None))
