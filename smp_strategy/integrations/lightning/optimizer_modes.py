"""``train`` and ``eval`` of schedule-free optimizers: all ranks switch modes together.

User hooks call these methods on their optimizers. During a run they are patched on the instances
(:mod:`smp_strategy.data_parallel.optimizer_state`), of the optimizer and of its ``LightningOptimizer``.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from smp_strategy.data_parallel.optimizer_state import MODES, has_to_switch
from smp_strategy.distributed.rendezvous import meet
from smp_strategy.engine.engine import Engine
from smp_strategy.model.patching import Patches

__all__ = ["switching_together"]


@contextmanager
def switching_together(engine: Engine, optimizers: Iterable[tuple[Optimizer, Any]]) -> Iterator[None]:
    """Patch ``train`` and ``eval`` of the optimizers while this is open.

    Args:
        engine: the engine of the run.
        optimizers: pairs of an optimizer and its LightningOptimizer.
    """
    with Patches() as patches:
        for optimizer, wrapped in optimizers:
            for mode in MODES:
                if callable(method := getattr(optimizer, mode, None)):
                    switch = _together(engine, optimizer, mode, method)
                    for owner in (optimizer, wrapped):
                        patches.put(owner, mode, switch)
        yield


def _together(engine: Engine, optimizer: Optimizer, mode: str, method: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(method)
    def switch() -> Any:
        if not has_to_switch(optimizer, mode) or not engine.inspection.divides_updates:
            return method()
        meet(f"optimizer.{mode}")
        with engine.changing_weights(optimizer):
            return method()

    return switch
