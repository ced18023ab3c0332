"""Split backward of a segment (zero-bubble pipelining): input gradients first, weight gradients later.

The first part computes the gradients of the segment's imports, which other stages wait for; the second those of its
weights. Together they equal one whole backward: the same kernels on the same tensors, each gradient added to its weight
once, every hook called once. The mechanism is drawn in [Note: split backward] below.

A leaf waits for the second part only if all its gradient comes through one product. A weight that is used twice gets
its gradients in the first part, added in the order of autograd, and so do the weights of nodes that compute all their
gradients at once (norms, autograd Functions, compiled or recomputed code).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.segments import Import, edge_of, import_at
from smp_strategy.pipeline.weight_gradients import can_come_later, formula_of

__all__ = ["Deferred", "Roots", "backward_of_imports", "explored", "node_of"]

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
#     frees the graph on its way. A prehook on each product keeps what [2] needs of it (`weight_gradients.py`), before
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
    """Run the first part of a segment's backward: as little as the gradients of ``imports`` need.

    Args:
        roots: tensors or edges at which backward starts.
        gradients: gradients of ``roots``.
        imports: imports of the segment whose gradients are waited for.
        backward: runs autograd.

    Returns:
        The second part.
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

    Args:
        roots: nodes at which backward starts.
        imports: imports to be reached.

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
