"""``train`` and ``eval`` of optimizers that have them: hooks call these on what ``configure_optimizers`` has returned.

They are replaced on the instances while a run lasts, and the ranks switch together
(:mod:`smp_strategy.data_parallel.step_hooks`). Those of a ``LightningOptimizer`` are of its class, so they are
replaced as well.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from smp_strategy.data_parallel.step_hooks import MODES, has_to_switch
from smp_strategy.distributed.rendezvous import meet
from smp_strategy.engine.engine import Engine

__all__ = ["switching_together"]


@contextmanager
def switching_together(engine: Engine, optimizers: Iterable[tuple[Optimizer, Any]]) -> Iterator[None]:
    """In here all ranks switch together.

    Args:
        engine: trains the module.
        optimizers: the user's, each with its LightningOptimizer.
    """
    replaced = []
    for optimizer, wrapped in optimizers:
        for mode in MODES:
            if callable(method := getattr(optimizer, mode, None)):
                switch = _together(engine, optimizer, mode, method)
                for owner in (optimizer, wrapped):
                    vars(owner)[mode] = switch
                    replaced.append((owner, mode))
    try:
        yield
    finally:
        for owner, mode in replaced:
            del vars(owner)[mode]


def _together(engine: Engine, optimizer: Optimizer, mode: str, method: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(method)
    def switch() -> Any:
        if not has_to_switch(optimizer, mode) or not engine.inspection.divides_updates:
            return method()
        meet(f"optimizer.{mode}")
        with engine.changing_weights(optimizer):
            return method()

    return switch
