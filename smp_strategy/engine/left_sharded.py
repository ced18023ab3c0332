"""Modules that a run left sharded; the next run, perhaps of another Trainer, goes on with the shards, or first restores
the full module.

The module itself refers to the engine that can restore it. Copies and pickles of the module drop the reference.
"""

from datetime import timedelta
from typing import Any, Final

import torch

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.device import chosen
from smp_strategy.engine.engine import Engine

__all__ = ["engine_left", "leave_spread", "restore_left"]

# Attribute of a module that was left sharded.
_LEFT: Final = "_smp_left"


def leave_spread(module: Any, engine: Engine) -> bool:
    """Mark ``module`` as left by ``engine``, if it is sharded, or if an error has ended an update of shares; returns
    whether it is marked: then the engine must not be closed.
    """
    is_left = engine.is_spread or engine.outcome.has_broken_update
    if is_left:
        vars(module)[_LEFT] = _EngineLeft(engine)
    return is_left


def engine_left(
    module: Any, config: SMPConfig, device: torch.device, timeout: timedelta | None, *, trains: bool = True
) -> Engine | None:
    """Engine that has left ``module`` sharded, if the next run can go on with it; ``None``: there is none, or it has
    other options, or the run needs a full module. Collective.

    Raises:
        SMPError: an error has ended the last update on some ranks only.
    """
    left: _EngineLeft | None = vars(module).get(_LEFT)
    engine = None if left is None else left.engine
    if engine is not None:
        engine.outcome.agree()
    if engine is None or (engine.config, engine.device, engine.timeout) != (config, chosen(device), timeout):
        return None
    return engine if engine.stays_spread(module, trains=trains) else None


def restore_left(module: Any) -> None:
    """Restore the full module on all ranks, if a run left it sharded; see :func:`engine_left`. Collective."""
    left = vars(module).pop(_LEFT, None)
    if left is not None and left.engine is not None:
        left.engine.outcome.agree()
        left.engine.restore_everywhere()


class _EngineLeft:
    """Reference from a module to its engine; ``None`` in copies."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: Any) -> "_EngineLeft":
        return _EngineLeft()

    def __reduce__(self) -> Any:
        return _EngineLeft, ()
