"""Backward of a segment in two parts: first what other stages wait for, later what nobody waits for.

The first part computes the gradients of the segment's imports, the second those of its weights. Together they do what
one whole backward does: the same kernels on the same tensors, each gradient added to its weight once, every hook
called once.

The graph is walked from the roots. Some of its nodes lead to an import; the others lead to leaves only. Where a
matrix product or a convolution of the first kind has an edge to one of the second, the gradient for that edge is not
computed in the first part. What it takes is kept (see :mod:`smp_strategy.pipeline.weight_gradients`), and the second
part computes it and goes on from there through autograd, to the leaf and its hooks. The first part frees the rest of
the graph, as any backward does.

A leaf waits for the second part only if all its gradient comes through one such node. A weight that is used twice gets
its gradients in the first part, added in the order of autograd, and so do those of nodes that compute all their
gradients at once (norms, autograd Functions, whatever is compiled or recomputed).
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

__all__ = ["Deferred", "backward_of_imports"]

Node = Any
"""Of autograd's graph."""
Roots = Sequence[Tensor] | Sequence[GradientEdge]
"""Where a backward begins."""


@final
class Deferred:
    """The part of a backward that is still to do."""

    def __init__(self, parts: Iterable[Callable[[], None]] = ()) -> None:
        self._parts = list(parts)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def run(self) -> None:
        """Do it; what it was made of is freed on the way."""
        # The latest first: it may still be in the processor's cache. No two of them add to the same weight.
        while self._parts:
            self._parts.pop()()


def backward_of_imports(roots: Roots, gradients: Sequence[Tensor], imports: Collection[Import]) -> Deferred:
    """Run as little of a segment's backward as its ``imports`` need.

    Args:
        roots: where it starts.
        gradients: of ``roots``.
        imports: those of the segment whose gradients are waited for.
    """
    whole = partial(torch.autograd.backward, roots, gradients)
    if not imports:
        return Deferred([whole])
    graph = _Graph([_node_of(root) for root in roots], imports)
    if not graph.inside:
        return Deferred([whole])
    products = graph.products()
    if not products:
        whole()
        return Deferred()
    parts: list[Callable[[], None]] = []
    handles = [node.register_prehook(partial(_keep, parts, node, edges)) for node, edges in products.items()]
    try:
        torch.autograd.backward(roots, gradients, inputs=graph.leaves(products))
    finally:
        for handle in handles:
            handle.remove()
    return Deferred(parts)


def _node_of(root: Tensor | GradientEdge) -> Node:
    return edge_of(root).node if isinstance(root, Tensor) else root.node


def _keep(parts: list[Callable[[], None]], node: Node, edges: "_Edges", gradients: Sequence[Tensor | None]) -> None:
    """Called when the gradient of a product is there."""
    (gradient,) = gradients
    if gradient is not None:
        formula = formula_of(node, list(edges))
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
"""Edges of a node that lead to leaves only, by their position."""


@final
class _Graph:
    """The graph of a segment.

    Args:
        roots: the nodes where backward starts.
        imports: what it is to reach.

    Attributes:
        inside: nodes that lead to an import.
    """

    def __init__(self, roots: Sequence[Node], imports: Collection[Import]) -> None:
        self._roots = roots
        self._above = _explored(roots)
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
        """Nodes inside that have edges to leaves of their own, whose gradients can come later."""
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
            for edge in edges.values():
                self._claim(edge.node, node if can_wait else None)
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
        """Note that ``owner`` leads to ``node`` and all below."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            before = self._owner.get(node, owner)
            if before is not owner:
                self._spoiled.update((before, owner))
            if node in self._owner and (before is owner or before is None):
                continue
            self._owner[node] = owner if before is owner else None
            waiting += [below for below, _ in node.next_functions if below is not None]


def _explored(roots: Iterable[Node]) -> dict[Node, list[Node]]:
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
