"""How an autograd Function says that it is a product, whose weight gradient can be computed later."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["WeightGradientFormula", "WeightGradientKind"]

WeightGradientFormula = Callable[[Tensor], list[Tensor]]
"""From the gradient of a node's result to gradients of some of its inputs."""


class WeightGradientKind(NamedTuple):
    """What is known of nodes that are products.

    A subclass of ``torch.autograd.Function`` can have one as its attribute ``product``. Its backward must leave out
    what ``make`` has been called for.
    """

    weight: int
    """Which input it is."""
    bias: int | None
    saved: tuple[str, ...]
    """Attributes of a node with what is saved for the formula."""
    make: Callable[[Any, Sequence[int]], WeightGradientFormula]
    """Called while a node is visited, with the inputs whose gradients will be asked for."""
