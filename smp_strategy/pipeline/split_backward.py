"""Split backward of a segment (zero-bubble pipelining): input gradients first, weight gradients later.

The first part computes the gradients of the segment's imports, which other stages wait for; the second those of its
weights. Together they equal one whole backward: the same kernels on the same tensors, each gradient added to its weight
once, every hook called once. The mechanism is drawn in [Note: split backward] below.

A leaf waits for the second part only if all its gradient comes through one product. A weight that is used twice gets
its gradients in the first part, added in the order of autograd, and so do the weights of nodes that compute all their
gradients at once (norms, autograd Functions, compiled or recomputed code).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from smp_strategy.activations.offload import ReadBack
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.weight_gradient_formula import WeightGradientFormula, WeightGradientKind
from smp_strategy.pipeline.segments import Import, edge_of, import_at

__all__ = ["can_come_later", "formula_of", "Deferred", "Roots", "backward_of_imports", "explored", "node_of"]


# --- weight gradients ------------------------------------------------------------------------------------------------
# Deferred weight gradients of matrix products and convolutions; see [Note: split backward] below.
#
# Autograd computes the gradients of a product's input and weight in one visit of its node, and frees the saved tensors.
# Here the operands of the weight's gradient (the input, and the gradient of the result) are taken from the node during
# that visit, in which autograd computes the input's gradient only. The formulas are those of autograd, kernel by
# kernel, so the results are bitwise equal.
#
# Only products and convolutions are worth it: biases and scales cost next to nothing, and a norm's kernel computes all
# of its gradients at once. An autograd Function that is a product declares it, see `WeightGradientKind`.


def can_come_later(node: Any, inputs: Sequence[int]) -> bool:
    """Whether the gradients of these ``inputs`` of ``node`` can be computed after its visit.

    Returns False if the node has hooks, because a hook must see all gradients at once, or if saved tensors are packed
    (by ``checkpoint``), because they can be unpacked only once; offloaded ones can be read repeatedly.
    """
    kind = _kind_of(node)
    if kind is None or kind.weight not in inputs or not {kind.weight, kind.bias}.issuperset(inputs):
        return False
    hooks = [saved.unpack_hook for name in kind.saved for saved in _all_of(getattr(node, name))]
    if not all(hook is None or (isinstance(hook, ReadBack) and hook.can_repeat) for hook in hooks):
        return False
    # Autograd does not list the hooks of a node: the dict behind a hook of our own shows whether there are others.
    handle = node.register_hook(_nothing)
    is_alone = len(handle.hooks_dict_ref()) == 1
    handle.remove()
    return is_alone


def formula_of(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
    """Function that computes the gradients of ``inputs``, in their order; call this while ``node`` is visited."""
    kind = _kind_of(node)
    assert kind is not None
    return kind.make(node, inputs)


def _kind_of(node: Any) -> WeightGradientKind | None:
    function = getattr(node, "_forward_cls", None)
    return _KINDS.get(type(node).__name__) if function is None else getattr(function, "product", None)


def _all_of(saved: Any) -> tuple[Any, ...]:
    return saved if isinstance(saved, tuple) else (saved,)


def _nothing(*gradients: Any) -> None:
    """A hook that changes nothing."""


def _addmm(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
    transposed = _is_transposed(node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides)
    weight = partial(_second_factor, node._saved_mat1.detach(), transposed, node._saved_alpha)
    if 0 not in inputs:
        return partial(_each, [weight])
    below, number = node.next_functions[0]
    return partial(_each, [partial(_summand, node._saved_beta, below._input_metadata[number].shape), weight])


def _mm(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
    transposed = _is_transposed(node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides)
    return partial(_each, [partial(_second_factor, node._saved_self.detach(), transposed, 1)])


def _bmm(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
    return partial(_each, [partial(_second_batch, node._saved_self.detach())])


def _convolution(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
    options = (
        *(node._saved_bias_sym_sizes_opt, node._saved_stride, node._saved_padding, node._saved_dilation),
        *(node._saved_transposed, node._saved_output_padding, node._saved_groups),
        [False, 1 in inputs, 2 in inputs],
    )
    return partial(_kernel, node._saved_input.detach(), node._saved_weight.detach(), options, tuple(inputs))


def _each(parts: Sequence[Callable[[Tensor], Tensor]], gradient: Tensor) -> list[Tensor]:
    return [part(gradient) for part in parts]


def _summand(factor: Any, shape: Sequence[int], gradient: Tensor) -> Tensor:
    return _times(gradient, factor).sum_to_size(tuple(shape))


def _is_transposed(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return strides[0] == 1 and strides[1] == sizes[0]


def _second_factor(first: Tensor, transposed: bool, factor: Any, gradient: Tensor) -> Tensor:
    # As autograd does it: the gradient gets the layout of the factor.
    if transposed and first.layout is gradient.layout is torch.strided:
        return _times(gradient.t().mm(first.conj()).t(), factor)
    return _times(first.t().conj().mm(gradient), factor)


def _second_batch(first: Tensor, gradient: Tensor) -> Tensor:
    return first.transpose(1, 2).conj().bmm(gradient)


def _times(tensor: Tensor, factor: Any) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _kernel(x: Tensor, weight: Tensor, options: Sequence[Any], inputs: Sequence[int], gradient: Tensor) -> list[Tensor]:
    found = torch.ops.aten.convolution_backward(gradient, x, weight, *options)
    return [found[position] for position in inputs]


# By the node's name: positions of weight and bias among the operation's inputs, saved tensors, and the formula.
_KINDS: Mapping[str, WeightGradientKind] = {
    "AddmmBackward0": WeightGradientKind(2, 0, ("_raw_saved_mat1",), _addmm),
    "MmBackward0": WeightGradientKind(1, None, ("_raw_saved_self",), _mm),
    "BmmBackward0": WeightGradientKind(1, None, ("_raw_saved_self",), _bmm),
    "ConvolutionBackward0": WeightGradientKind(1, 2, ("_raw_saved_input", "_raw_saved_weight"), _convolution),
}


# --- split backward --------------------------------------------------------------------------------------------------


Node = Any
"""A node of autograd's graph."""
Roots = Sequence[Tensor] | Sequence[GradientEdge]
"""Start of a backward."""
Backward = Callable[..., None]
"""``torch.autograd.backward``, or a function with its arguments."""

# [Note: split backward]
# Nodes that lead to an import are *inside*, the others lead to leaves only. A product (matrix product, convolution) at
# the border has its weight gradient deferred:
#
#     root --> inside --> product --> inside --> import     first part, [1]
#                           |
#                           '.......> outside --> leaf      second part, [2]
#
# [1] runs autograd with `inputs=` all leaves but those behind products, so autograd itself skips the dotted edges, and
#     frees the graph on its way. A prehook on each product keeps what [2] needs of it (the formulas above), before
#     the visit frees it.
# [2] computes the gradient of a dotted edge by formula and continues from there through autograd, to the leaf and its
#     hooks.
#
# A node outside that two nodes inside lead to would get its gradient in two parts, and its hooks would run twice: such
# products are *spoiled*, and stay whole in [1].


@final
class Deferred:
    """The second part of a split backward: weight gradients still to be computed."""

    def __init__(self, parts: Iterable[Callable[[], None]] = ()) -> None:
        self._parts = list(parts)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def run(self) -> None:
        """Compute them; saved tensors are freed on the way."""
        # The latest first: it may still be in the processor's cache. No two of them add to the same weight.
        while self._parts:
            self._parts.pop()()


def backward_of_imports(
    roots: Roots,
    gradients: Sequence[Tensor],
    imports: Collection[Import],
    backward: Backward = torch.autograd.backward,
) -> Deferred:
    """Run the first part of a segment's backward: as little as the gradients of ``imports`` need; returns the second
    part.
    """
    whole = partial(backward, roots, gradients)
    # Nobody waits for anything: all of it can come later.
    if not imports:
        return Deferred([whole])
    graph = _Graph([node_of(root) for root in roots], imports)
    if not graph.inside:
        return Deferred([whole])
    products = graph.products()
    if not products:
        whole()
        return Deferred()
    parts: list[Callable[[], None]] = []
    handles = [node.register_prehook(partial(_keep, parts, node, edges)) for node, edges in products.items()]
    try:
        # Imports are reached without being named: each hangs on a leaf of its own, the anchor of `segments.enter`.
        backward(roots, gradients, inputs=graph.leaves(products))
    finally:
        for handle in handles:
            handle.remove()
    return Deferred(parts)


def node_of(root: Tensor | GradientEdge) -> Node:
    """Node at which a backward from ``root`` starts."""
    return edge_of(root).node if isinstance(root, Tensor) else root.node


def _keep(parts: list[Callable[[], None]], node: Node, edges: "_Edges", gradients: Sequence[Tensor | None]) -> None:
    """Prehook of a product: keep what its weight gradient needs."""
    (gradient,) = gradients
    if gradient is not None:
        formula = formula_of(node, list(edges))
        # The version, since the gradient is kept, not copied: a hook may still change it in place.
        parts.append(partial(_go_on, formula, list(edges.values()), gradient, gradient._version))


def _go_on(
    formula: Callable[[Tensor], list[Tensor]], edges: Sequence[GradientEdge], gradient: Tensor, version: int
) -> None:
    if gradient._version != version:
        raise UnsupportedError(
            f"A gradient of shape {list(gradient.shape)} was changed in place while the gradient of a weight still had "
            "to be computed from it, presumably by a hook. Let the hook return a new tensor."
        )
    with torch.no_grad():
        found = formula(gradient)
    torch.autograd.backward(edges, found)


_Edges = dict[int, GradientEdge]
"""Edges of a node that lead to leaves only, by position."""


@final
class _Graph:
    """Autograd graph of a segment, divided as in [Note: split backward].

    Attributes:
        inside: nodes that lead to an import.
    """

    def __init__(self, roots: Sequence[Node], imports: Collection[Import]) -> None:
        self._roots = roots
        self._above = explored(roots)
        ends = [node for node in self._above if import_at(node) in imports]
        self.inside = set(ends)
        while ends:
            above = [node for node in self._above[ends.pop()] if node not in self.inside]
            self.inside.update(above)
            ends += above
        # Outside: which node inside leads there; `None` where several do, or one that cannot wait.
        self._owner: dict[Node, Node | None] = {}
        self._spoiled: set[Node] = set()

    def products(self) -> dict[Node, _Edges]:
        """Products at the border whose weight gradients can come later, with the edges to their leaves."""
        found: dict[Node, _Edges] = {}
        for node in self._at_the_border():
            edges = {
                position: GradientEdge(below, number)
                for position, (below, number) in enumerate(node.next_functions)
                if below is not None and below not in self.inside
            }
            can_wait = can_come_later(node, list(edges))
            if can_wait:
                found[node] = edges
            # Nodes that cannot wait claim as well: a leaf that they share with a product spoils it.
            for edge in edges.values():
                self._claim(edge.node, node if can_wait else None)
        # So does a root from which no import is reached: its backward is part of the first run.
        for root in self._roots:
            if root not in self.inside:
                self._claim(root, None)
        return {node: edges for node, edges in found.items() if node not in self._spoiled}

    def leaves(self, products: Collection[Node]) -> list[GradientEdge]:
        """All leaves but those of ``products``."""
        return [
            GradientEdge(node, 0)
            for node, owner in self._owner.items()
            if owner not in products and hasattr(node, "variable")
        ]

    def _at_the_border(self) -> Iterable[Node]:
        """Nodes inside with an edge that leads outside."""
        outside = (above for node, above in self._above.items() if node not in self.inside)
        return dict.fromkeys(node for above in outside for node in above if node in self.inside)

    def _claim(self, node: Node, owner: Node | None) -> None:
        """Make ``owner`` the owner of ``node`` and all below; nodes with two owners get none, and spoil both."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            before = self._owner.get(node, owner)
            if before is not owner:
                self._spoiled.update((before, owner))
            # Seen with this owner, or already nobody's: so is all below.
            if node in self._owner and (before is owner or before is None):
                continue
            self._owner[node] = owner if before is owner else None
            waiting += [below for below, _ in node.next_functions if below is not None]


def explored(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """All nodes below ``roots``, each with those directly above it."""
    above: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = list(above)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            known = above.get(below)
            if known is not None:
                known.append(node)
            else:
                above[below] = [node]
                waiting.append(below)
    return above
