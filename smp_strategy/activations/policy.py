"""What becomes of the tensors that a unit would keep for its backward.

They are most of what a stage holds during a step. Each unit may instead keep its inputs and compute the rest again, put
what it keeps into host memory, or both. This is the plain value that says so: chosen by the user's options
(:mod:`smp_strategy.activations.selection`), weighed by whoever predicts memory and times, and carried out by
:mod:`smp_strategy.activations.unit_wrapper`. All choices give the same numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

__all__ = ["KEEP", "Recompute", "ActivationPolicy", "Treatments"]

Recompute = Literal["no", "all", "cheap"]


@final
@dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """What becomes of what one unit keeps for backward."""

    recompute: Recompute = "no"
    """``all``: the unit keeps its inputs and runs once more in backward. ``cheap``: it also keeps the results of
    matrix products, convolutions and attention, and computes the rest again."""
    offload: bool = False
    """Put what is kept into host memory until backward comes near."""
    group: int | None = 1
    """How many consecutive calls of such units of one list are computed again together: the later ones keep no input
    that an earlier one has made. ``None``: as many as follow each other on a stage."""
    preserve_rng_state: bool = True
    """Draw the same random numbers when computing again."""

    @property
    def is_default(self) -> bool:
        """Whether autograd keeps what it wants to."""
        return self.recompute == "no" and not self.offload


KEEP = ActivationPolicy()

Treatments = Mapping[str, ActivationPolicy]
"""By name of the unit; units that are not named keep everything."""
