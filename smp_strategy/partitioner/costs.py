"""What one unit costs, as plain data: bytes that stay, bytes per microbatch, seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

from smp_strategy.trace.work import Work

__all__ = ["Held", "UnitCost"]


class Held(NamedTuple):
    """Bytes that a stage holds of one parameter for the whole of the training. A frozen one has no more than itself."""

    parameter: int
    gradient: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)

    def plus(self, other: "Held") -> "Held":
        """Both."""
        return Held(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@final
@dataclass(frozen=True)
class UnitCost:
    """What one unit costs, together with the operations of the glue that always run where its results are."""

    name: str
    parameters: Mapping[int, Held]
    """Bytes of each of its parameters, by an identity that shared parameters have in common."""
    activation_bytes: int = 0
    """Kept for the backward pass of one microbatch."""
    output_bytes: int = 0
    """Bytes of its results, per microbatch."""
    work: Work = Work()
    """Of one microbatch."""

    @property
    def held(self) -> Held:
        """Bytes of all its parameters."""
        total = Held(0)
        for held in self.parameters.values():
            total = total.plus(held)
        return total
