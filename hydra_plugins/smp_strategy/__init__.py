"""Hydra plugin namespace; the two classes are in :mod:`smp_strategy.integrations.hydra`."""

from smp_strategy.integrations.hydra import RecipeSource, SMPSearchPathPlugin

__all__ = ["RecipeSource", "SMPSearchPathPlugin"]
