"""Hydra looks for plugins in this namespace; the two classes live in :mod:`smp_strategy.hydra`."""

from smp_strategy.hydra import RecipeSource, SMPSearchPathPlugin

__all__ = ["RecipeSource", "SMPSearchPathPlugin"]
