"""Active engines: those of this process that serve a module, for calls that name no engine, and perhaps no module.

SageMaker's ``resume_from_checkpoint(path)`` names no model, because a process has a single one there. Here it may have
several, so engines are registered while they serve a module. The registry keeps none alive.
"""

import os
from typing import Any, Final
from weakref import WeakSet

__all__ = ["attached", "forget", "note"]

_ENGINES: Final[WeakSet[Any]] = WeakSet()
# Engines of the process that has forked belong to its ranks.
os.register_at_fork(after_in_child=_ENGINES.clear)


def note(engine: Any) -> None:
    """Register ``engine``, which has taken on a module."""
    _ENGINES.add(engine)


def forget(engine: Any) -> None:
    """Remove ``engine``, which is closed."""
    _ENGINES.discard(engine)


def attached() -> list[Any]:
    """Engines of this process that serve a module."""
    return list(_ENGINES)
