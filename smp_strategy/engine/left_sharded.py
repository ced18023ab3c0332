"""A module that a run has left spread over ranks meets the next run, maybe of another Trainer, which needs it whole.

So the module itself carries the engine that can restore it. Its copies and what is pickled of it do not.
"""

from typing import Any, Final

from smp_strategy.engine.engine import Engine

__all__ = ["leave_spread", "restore_left"]

# The attribute of a module that some ranks have a part of only.
_LEFT: Final = "_smp_left"


def leave_spread(module: Any, engine: Engine) -> None:
    """Note on ``module`` that ``engine`` has left it spread."""
    vars(module)[_LEFT] = _EngineLeft(engine)


def restore_left(module: Any) -> None:
    """Make ``module`` whole on all ranks, if a run has left it spread. Collective."""
    left = vars(module).pop(_LEFT, None)
    if left is not None and left.engine is not None:
        left.engine.restore_everywhere()


class _EngineLeft:
    """The engine; ``None`` on a copy."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: Any) -> "_EngineLeft":
        return _EngineLeft()

    def __reduce__(self) -> Any:
        return _EngineLeft, ()
