"""Stages that the user gives to modules by hand.

Nothing is known of units or stages while a model is built, so a stage is only noted: as an attribute of the module.
There are two ways to do so, with the names that SageMaker gives them::

    smp_strategy.set_partition(model.head, 1)      # a module and everything in it now

    with smp_strategy.partition(0):                # every module that is created in here
        self.encoder = Encoder()

The later note replaces the earlier one, so contexts may be nested and single layers placed after the whole. A module
without a note follows the one that holds it. Copies of a module keep its note. What becomes of the notes is decided
when the pipeline is set up (:mod:`smp_strategy.engine.given_partition`).
"""

from contextlib import AbstractContextManager
from typing import TypeVar

from torch import nn

from smp_strategy.errors import ConfigError
from smp_strategy.model.annotations import ModuleNotes
from smp_strategy.model.units import has_state

__all__ = ["partition", "placed_modules", "set_partition"]

_STAGES = ModuleNotes[int]("_smp_stage")

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
    _STAGES.leave_on(module, stage)
    return module


def partition(stage: int) -> AbstractContextManager[None]:
    """Place all modules that are created inside on a pipeline stage, wherever and whenever they are registered.

    Contexts may be nested: the innermost wins. It takes effect with ``auto_partition=False``.

    Raises:
        ConfigError: ``stage`` is no stage number.
    """
    _check(stage)
    return _STAGES.on_new(stage)


def placed_modules(root: nn.Module) -> dict[str, int]:
    """Noted stages of modules in ``root``, under every name that they have there."""
    noted = ((name, _STAGES.of(module)) for name, module in root.named_modules(remove_duplicate=False))
    return {name: stage for name, stage in noted if stage is not None}


def _check(stage: object) -> None:
    if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
        raise ConfigError(f"A stage must be a whole number from 0 on, but is {stage!r}.")
