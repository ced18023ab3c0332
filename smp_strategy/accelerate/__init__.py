"""The front door for Accelerate: its training loops, as they are, under any layout."""

from smp_strategy.accelerate.session import Session

__all__ = ["Session"]
