"""The Accelerator of this door: Accelerate's own, or a user's subclass of it, with our hooks in front.

The object is the user's and exists already, so its class is replaced rather than the object. The new class keeps name
and module: nothing that asks for them sees a difference.
"""

import functools
from typing import Any

from smp_strategy.integrations.accelerate.background import BackgroundHooks
from smp_strategy.integrations.accelerate.collectives import CollectiveHooks
from smp_strategy.integrations.accelerate.data import LoaderHooks
from smp_strategy.integrations.accelerate.save_state import StateFolderHooks
from smp_strategy.integrations.accelerate.training import TrainingHooks

__all__ = ["SMPHooks", "taken_over"]


class SMPHooks(BackgroundHooks, TrainingHooks, LoaderHooks, CollectiveHooks, StateFolderHooks):
    """All hooks together."""


def taken_over(accelerator: Any) -> SMPHooks:
    """``accelerator`` itself, whose class has our hooks from now on."""
    if not isinstance(accelerator, SMPHooks):
        stock: Any = type(accelerator)
        accelerator.__class__ = _with_hooks(stock)
    hooks: SMPHooks = accelerator
    return hooks


@functools.cache
def _with_hooks(stock: Any) -> Any:
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    return type(stock.__name__, (SMPHooks, stock), names)
