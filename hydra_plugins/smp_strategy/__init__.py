"""Hydra looks for plugins in this namespace; the two classes live in :mod:`smp_strategy.integrations.hydra`."""

from smp_strategy.integrations.hydra import RecipeSource, SMPSearchPathPlugin

__all__ = ["RecipeSource", "SMPSearchPathPlugin"]
