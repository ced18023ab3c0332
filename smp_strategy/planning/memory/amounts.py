"""Memory of one rank by kind of tensor: parameters, gradients, optimizer state, buffers."""

from dataclasses import dataclass
from typing import final

__all__ = ["RankMemory"]


@final
@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that a rank holds between steps."""

    rank: int
    stage: int
    parameters: int
    """Bytes of values that stay on the rank between uses."""
    gathered: int
    """Peak bytes of gathered values, which come and go."""
    gradients: int
    optimizer: int
    """Bytes of optimizer state."""
    buffers: int

    @property
    def amounts(self) -> dict[str, int]:
        """Bytes by kind."""
        return {
            "parameters": self.parameters,
            "gathered": self.gathered,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "buffers": self.buffers,
        }

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.amounts.values())
