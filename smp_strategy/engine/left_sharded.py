"""Modules that a run left sharded; the next run, perhaps of another Trainer, first restores the full module.

The module itself refers to the engine that can restore it. Copies and pickles of the module drop the reference.
"""

from typing import Any, Final

from smp_strategy.engine.engine import Engine

__all__ = ["leave_spread", "restore_left"]

# Attribute of a module that was left sharded.
_LEFT: Final = "_smp_left"


def leave_spread(module: Any, engine: Engine) -> None:
    """Mark ``module`` as left sharded by ``engine``."""
    vars(module)[_LEFT] = _EngineLeft(engine)


def restore_left(module: Any) -> None:
    """Restore the full module on all ranks, if a run left it sharded. Collective."""
    left = vars(module).pop(_LEFT, None)
    if left is not None and left.engine is not None:
        left.engine.restore_everywhere()


class _EngineLeft:
    """Reference from a module to its engine; ``None`` in copies."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: Any) -> "_EngineLeft":
        return _EngineLeft()

    def __reduce__(self) -> Any:
        return _EngineLeft, ()
