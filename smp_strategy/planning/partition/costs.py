"""What one unit costs, as plain data: bytes that stay, bytes per microbatch, seconds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

from smp_strategy.model.trace.work_trace import Work

__all__ = ["Held", "UnitCost"]


class Held(NamedTuple):
    """Bytes that a rank holds of one parameter, or of some that are spread together over ranks of the stage.

    A frozen one has no gradient and no state.
    """

    parameter: int
    """Its values, between uses."""
    gradient: int = 0
    """Between the last backward and the optimizer's step."""
    optimizer: int = 0
    """State of the optimizer."""
    gathered: int = 0
    """Of parameters that are spread: the values of all ranks, while they are in use."""
    unreduced: int = 0
    """Of parameters that are spread: whole gradients, of the sum of which the rank will keep its share."""

    @property
    def states(self) -> int:
        """What stays: parameters, gradients and optimizer state."""
        return self.parameter + self.gradient + self.optimizer

    @property
    def passing(self) -> int:
        """What comes and goes during a step."""
        return self.gathered + self.unreduced

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)

    @classmethod
    def sum_of(cls, parts: Iterable["Held"]) -> "Held":
        """All of ``parts``."""
        return cls(*map(sum, zip(cls(0), *parts, strict=True)))


@final
@dataclass(frozen=True)
class UnitCost:
    """What one unit costs, together with the operations of the glue that always run where its results are."""

    name: str
    parameters: Mapping[int, Held]
    """What a rank holds of each of its parameters, by an identity that shared parameters have in common."""
    activation_bytes: int = 0
    """Kept for the backward pass of one microbatch."""
    output_bytes: int = 0
    """Bytes of its results, per microbatch."""
    work: Work = Work()
    """Of one microbatch."""
    whole: Held = Held(0)
    """All its parameters, also where each rank holds a part of them only."""

    @property
    def held(self) -> Held:
        """What a rank holds of all its parameters."""
        return Held.sum_of(self.parameters.values())
