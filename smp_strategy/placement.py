"""Stages that the user gives to modules by hand.

Nothing is known of units or stages while a model is built, so a stage is only noted: as an attribute of the module.
There are two ways to do so, with the names that SageMaker gives them::

    smp_strategy.set_partition(model.head, 1)      # a module and everything in it now

    with smp_strategy.partition(0):                # every module that is created in here
        self.encoder = Encoder()

The later note replaces the earlier one, so contexts may be nested and single layers placed after the whole. A module
without a note follows the one that holds it. Copies of a module keep its note. What becomes of the notes is decided
when the pipeline is set up (:mod:`smp_strategy.beforehand`).
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import nn

from smp_strategy.errors import ConfigError
from smp_strategy.units import has_state

__all__ = ["partition", "placed_modules", "set_partition"]

_NOTE = "_smp_stage"
_WATCHES = "_smp_watches"
# The stage of modules that are being created, per thread and per asynchronous task.
_CURRENT: ContextVar[int | None] = ContextVar("stage of new modules", default=None)

Module = TypeVar("Module", bound=nn.Module)


def set_partition(module: Module, stage: int) -> Module:
    """Place ``module``, and everything that it holds now, on a pipeline stage; returns ``module``.

    It takes effect with ``auto_partition=False``. What is placed later wins, whichever way.

    Raises:
        ConfigError: ``stage`` is no stage number, or the module has no parameters and so runs where its input is.
    """
    _check(stage)
    if not has_state(module):
        raise ConfigError(
            f"`set_partition` got a {type(module).__name__} without parameters. Such a module runs on the stage "
            "where its input is. Place a module that has parameters, once its layers exist."
        )
    for part in module.modules():
        vars(part)[_NOTE] = stage
    return module


@contextmanager
def partition(stage: int) -> Iterator[None]:
    """Place all modules that are created inside on a pipeline stage, wherever and whenever they are registered.

    Contexts may be nested: the innermost wins. It takes effect with ``auto_partition=False``.

    Raises:
        ConfigError: ``stage`` is no stage number.
    """
    _check(stage)
    _watch_creation()
    before = _CURRENT.set(stage)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def placed_modules(root: nn.Module) -> dict[str, int]:
    """Noted stages of modules in ``root``, under every name that they have there."""
    return {
        name: vars(module)[_NOTE]
        for name, module in root.named_modules(remove_duplicate=False)
        if _NOTE in vars(module)
    }


def _check(stage: object) -> None:
    if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
        raise ConfigError(f"A stage must be a whole number from 0 on, but is {stage!r}.")


def _watch_creation() -> None:
    """Have every new module ask for the current stage.

    Classes of all kinds have only ``nn.Module.__init__`` in common. It stays wrapped: threads may leave their contexts
    in any order, and outside of a context the wrapper does nothing.
    """
    original = nn.Module.__init__
    if getattr(original, _WATCHES, False):
        return

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        stage = _CURRENT.get()
        if stage is not None:
            vars(self)[_NOTE] = stage

    setattr(init, _WATCHES, True)
    nn.Module.__init__ = init  # type: ignore[method-assign]
