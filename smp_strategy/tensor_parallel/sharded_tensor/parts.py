"""``InParts``: parts behind split tensors, and their autograd graph.

Operations work on parts, which are ordinary tensors with an ordinary graph. A border node (:class:`_Border`) makes the
split tensor a tensor of the graph as well; no gradient passes it as long as all users take the part. Code that bypasses
Python uses the split tensor itself: its gradient arrives at the border, split or whole. The result of such code is a
split tensor with another node; its part is then reached by crossing in the other direction (:class:`_ToPart`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.distributed.torch_private import node_of, plain_functions
from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.tensor_parallel import autograd_collectives as functions
from smp_strategy.tensor_parallel.sharded_tensor.shapes import Split

__all__ = ["Along", "InParts", "part_of", "put_together"]


# [Note: border nodes]
#
#   part --(_Border)--> split tensor --(code that bypasses Python)--> another split tensor --(_ToPart)--> its part
#
# Operations in Python take `split.part`, whose graph never touches the border. Autograd Functions, module hooks and
# backward itself get the split tensor: its `grad_fn` is the border, through which their gradients reach the part. After
# such code `grad_fn` is a node that is not a border; then the part is stale, and `InParts.part` crosses back, once per
# node (`_crossed`). After an in-place change of the part the split tensor gets a new border (`_BorderAgain`), and so do
# the split tensors that it is a view of.


class Along(NamedTuple):
    """How a tensor is split."""

    group: TensorGroup
    """Ranks that have the parts."""
    dim: int
    """Dim that is cut; not negative."""
    lengths: tuple[int, ...]
    """Lengths of the ranks' parts along it."""


class InParts(Tensor):
    """Base of ``SplitTensor``, as autograd and the operations see it.

    Attributes:
        along: How it is split.
        cutting: Sizes for rules; faster than reading them from the tensor.
    """

    along: Along
    cutting: Split
    _part: Tensor
    _part_node: Any
    _crossed: Any
    _base_parts: "InParts | None"

    @classmethod
    def of(cls, part: Tensor, along: Along, base: "InParts | None" = None) -> Self:
        """The split tensor of which this rank has ``part``.

        Args:
            part: This rank's part, which gradients flow back to.
            along: How it is split.
            base: Split tensor of which it is a view.
        """
        assert part.shape[along.dim] == along.lengths[along.group.rank], "a part has another length than it should have"
        if part.requires_grad:
            with torch.enable_grad():
                made: Self = _Border.apply(part, cls, along)
        else:
            made = cls._hollow(part, along)
        made._part, made._part_node = part, part.grad_fn
        made._crossed, made._base_parts = None, base
        return made

    @classmethod
    def _hollow(cls, part: Tensor, along: Along) -> Self:
        sizes = list(part.shape)
        sizes[along.dim] = sum(along.lengths)
        made: Self = Tensor._make_wrapper_subclass(
            cls, sizes, strides=_strides(part, sizes), dtype=part.dtype, device=part.device
        )
        made.along = along
        made.cutting = Split(tuple(sizes), along.dim, along.lengths, along.group.rank)
        return made

    @property
    def part(self) -> Tensor:
        """This rank's part."""
        node = self.node  # See [Note: border nodes].
        if node is None or type(node) in _BORDERS or node is self._crossed or not torch.is_grad_enabled():
            return self._part
        self._part, self._crossed = _ToPart.apply(self), node
        self._part_node = self._part.grad_fn
        return self._part

    @property
    def node(self) -> Any:
        """Autograd node of the split tensor itself."""
        return node_of(self)

    def whole(self) -> Tensor:
        """All-gather of the parts, for code that is the same on all ranks; collective."""
        return functions.gather(self.part, *self.along)

    def changed(self) -> Self:
        """Update the graph after the part was changed in place."""
        parts: InParts | None = self
        while parts is not None:
            if parts._part.grad_fn is not parts._part_node:
                _BorderAgain.apply(parts, parts._part)
                parts._part_node = parts._part.grad_fn
            parts = parts._base_parts
        return self

    def begin(self, requires_grad: bool) -> Self:
        part = self.part
        if requires_grad and not part.requires_grad:
            self._part = part.detach().requires_grad_()  # other users of this part keep their flag
            _BorderAgain.apply(self, self._part)
        elif not requires_grad:
            part.requires_grad_(False)
            with plain_functions():
                self.detach_()
        return self


def part_of(whole: Tensor, along: Along) -> Tensor:
    """This rank's part of a tensor that is whole, or split along any dim."""
    if isinstance(whole, InParts):
        if whole.along == along:
            return whole.part
        whole = whole.whole()
    if whole.requires_grad and torch.is_grad_enabled():
        return functions.split(whole, *along)
    rank = along.group.rank
    return whole.narrow(along.dim, sum(along.lengths[:rank]), along.lengths[rank])


def put_together(tree: Any) -> Any:
    """``tree`` with its split tensors gathered; all ranks of the group call it."""
    if not any(isinstance(leaf, InParts) for leaf in leaves_of(tree)):
        return tree
    return pytree.tree_map_only(InParts, InParts.whole, tree)


class _Border(torch.autograd.Function):
    """Node from a part to its split tensor."""

    # The original `apply`, not the one that a pipeline installs: no placed tensor comes here.
    apply = vars(torch.autograd.Function)["apply"]

    @staticmethod
    def forward(ctx: Any, part: Tensor, kind: type[InParts], along: Along) -> Tensor:
        ctx.along = along
        ctx.set_materialize_grads(False)
        return kind._hollow(part, along)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None if gradients[0] is None else part_of(gradients[0], ctx.along), None, None


class _BorderAgain(torch.autograd.Function):
    """Node for an existing split tensor whose part has changed."""

    apply = vars(torch.autograd.Function)["apply"]

    @staticmethod
    def forward(ctx: Any, split: InParts, part: Tensor) -> Tensor:
        ctx.along = split.along
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(split)
        return split

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None if gradients[0] is None else part_of(gradients[0], ctx.along)


class _ToPart(torch.autograd.Function):
    """Node from a split tensor to its part."""

    apply = vars(torch.autograd.Function)["apply"]

    @staticmethod
    def forward(ctx: Any, split: InParts) -> Tensor:
        ctx.kind, ctx.along = type(split), split.along
        ctx.set_materialize_grads(False)
        return split._part.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None if gradients[0] is None else ctx.kind.of(gradients[0], ctx.along)


_BORDERS: frozenset[Any] = frozenset(kind._backward_cls for kind in (_Border, _BorderAgain))


def _strides(part: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a whole tensor with the memory order of the part."""
    order = range(part.dim())
    if not part.is_contiguous():
        order = sorted(order, key=lambda dim: part.stride(dim), reverse=True)  # type: ignore[assignment]
    strides, step = [0] * part.dim(), 1
    for dim in reversed(order):
        strides[dim] = step if part.stride(dim) or part.is_contiguous() else 0
        step *= sizes[dim] if strides[dim] else 1
    return tuple(strides)
