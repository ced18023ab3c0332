"""Tools for tests of distributed code; shipped, so that users can test their own modules under a layout."""

from smp_strategy.testing.ranks import run_ranks

__all__ = ["run_ranks"]
