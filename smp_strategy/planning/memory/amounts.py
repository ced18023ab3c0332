"""What one rank holds, as numbers."""

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
    """Values that are there between uses."""
    gathered: int
    """Values of all ranks that came and went, at most at a time."""
    gradients: int
    optimizer: int
    """State of the optimizers."""
    buffers: int

    @property
    def amounts(self) -> dict[str, int]:
        """By kind."""
        return {
            "parameters": self.parameters,
            "gathered": self.gathered,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "buffers": self.buffers,
        }

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.amounts.values())
