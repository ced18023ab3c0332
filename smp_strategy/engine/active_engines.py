"""Which engines of this process have taken on a module: to calls that are given the module, or nothing at all.

SageMaker's ``resume_from_checkpoint(path)`` names no model: there is one in a process. Here there may be several, so
engines are known from the time when they take on a module until they are closed. Nobody is kept alive by that.
"""

from typing import Any, Final
from weakref import WeakSet

__all__ = ["attached", "forget", "note"]

_ENGINES: Final[WeakSet[Any]] = WeakSet()


def note(engine: Any) -> None:
    """``engine`` has taken on a module."""
    _ENGINES.add(engine)


def forget(engine: Any) -> None:
    """``engine`` is closed."""
    _ENGINES.discard(engine)


def attached() -> list[Any]:
    """The engines of this process that serve a module."""
    return list(_ENGINES)
