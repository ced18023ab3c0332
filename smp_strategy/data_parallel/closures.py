"""Closures of optimizers, which evaluate the loss."""

from collections.abc import Callable
from typing import Any

from smp_strategy.errors import UnsupportedError

__all__ = ["evaluated_once"]


def evaluated_once(closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
    """``closure``, which refuses to be called again.

    An optimizer that evaluates the loss again does so at weights that it has changed by what it knows of all
    gradients (a line search, a perturbation of a given norm); on a rank it knows those of one stage.
    """
    calls = 0

    def once() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise UnsupportedError(
                f"The optimizer {type(optimizer).__name__} evaluates the loss several times per step, which is not "
                "built yet for strategy 'smp': it would decide by the gradients of one stage. Use an optimizer that "
                "calls its closure once."
            )
        return closure()

    return once
