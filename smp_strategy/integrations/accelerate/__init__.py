"""The front door for Accelerate: its training loops, as they are, under any layout.

The launcher reads a part of this room before any model exists, so public names are looked up when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_strategy.integrations.accelerate.session import Session as Session

__all__ = ["Session"]

_HOME = {"Session": "smp_strategy.integrations.accelerate.session"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
