"""Tools for tests of distributed code; shipped, so that users can test their own modules under a layout."""

from smp_strategy.testing.ports import free_port
from smp_strategy.testing.ranks import run_ranks

__all__ = ["free_port", "run_ranks"]
