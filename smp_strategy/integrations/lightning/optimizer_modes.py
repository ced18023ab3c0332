"""``train`` and ``eval`` of schedule-free optimizers: all ranks switch modes together.

User hooks call these methods on their optimizers. During a run they are patched on the instances
(:mod:`smp_strategy.engine.optimizer_steps`), of the optimizer and of its ``LightningOptimizer``.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.optimizer_steps import switch_mode
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
            for mode in ("train", "eval"):
                if callable(method := getattr(optimizer, mode, None)):
                    switch = _together(engine, optimizer, mode, method)
                    for owner in (optimizer, wrapped):
                        patches.put(owner, mode, switch)
        yield


def _together(engine: Engine, optimizer: Optimizer, mode: str, method: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(method)
    def switch() -> Any:
        return switch_mode(engine, optimizer, mode, method)

    return switch
