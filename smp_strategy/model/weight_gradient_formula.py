"""Interface by which an autograd Function offers a deferred weight gradient (zero-bubble schedules)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["WeightGradientFormula", "WeightGradientKind"]

WeightGradientFormula = Callable[[Tensor], list[Tensor]]
"""Maps the gradient of a node's result to gradients of some of its inputs."""


class WeightGradientKind(NamedTuple):
    """Description of an autograd node that is a matrix product.

    A subclass of ``torch.autograd.Function`` can have one as its attribute ``product``. Its backward must skip the
    gradients that ``make`` was called for.
    """

    weight: int
    """Position of the weight among the inputs."""
    bias: int | None
    """Position of the bias, if there is one."""
    saved: tuple[str, ...]
    """Attributes of a node that hold the tensors saved for the formula."""
    make: Callable[[Any, Sequence[int]], WeightGradientFormula]
    """Called while a node is visited, with the positions of the inputs whose gradients will be computed later."""
