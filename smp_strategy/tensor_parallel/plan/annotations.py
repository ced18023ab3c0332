"""Which modules the user wants to be split, said by hand.

There are two ways, with the names that SageMaker gives them::

    smp_strategy.set_tensor_parallelism(model.head, False)     # a module and everything in it now

    with smp_strategy.tensor_parallelism():                    # every module that is created in here
        self.encoder = Encoder()

The later note replaces the earlier one, so contexts may be nested (the innermost wins) and single layers named
after the whole. A module without a note follows the one that holds it. Where nothing is said, everything is split that
can be; where a module is enabled by hand that is not inside of a disabled one, only what is enabled. Copies of a module
keep its note.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import nn

from smp_strategy.errors import ConfigError
from smp_strategy.model.annotations import ModuleNotes

__all__ = ["disabled", "set_tensor_parallelism", "tensor_parallelism"]

_ENABLED = ModuleNotes[bool]("_smp_tensor_parallel")

Module = TypeVar("Module", bound=nn.Module)


def set_tensor_parallelism(module: Module, enabled: bool = True) -> Module:
    """Say whether ``module``, and everything that it holds now, is to be split; returns ``module``.

    What is said later wins, whichever way.

    Raises:
        ConfigError: ``enabled`` is neither true nor false.
    """
    _check(enabled)
    _ENABLED.leave_on(module, enabled)
    return module


def tensor_parallelism(enabled: bool = True) -> AbstractContextManager[None]:
    """Say whether all modules that are created inside are to be split. Contexts may be nested: the innermost wins.

    Raises:
        ConfigError: ``enabled`` is neither true nor false.
    """
    _check(enabled)
    return _ENABLED.on_new(enabled)


def disabled(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The modules that are not to be split by what the user has said, with the reason.

    Args:
        modules: all modules by qualified name, those that hold others first.
    """
    notes: dict[str, bool] = {}
    # What is said of the outermost module around that something is said of.
    outermost: dict[str, bool] = {}
    for name, module in modules.items():
        around = name.rpartition(".")[0]
        note = _ENABLED.of(module)
        if note is None:
            note = notes.get(around)
        if note is not None:
            outermost[name] = outermost.get(around, note)
            notes[name] = note
    is_chosen = any(outermost.values())
    reasons = {
        True: None,
        False: "tensor parallelism is disabled for it",
        None: "tensor parallelism is not enabled for it",
    }
    found = {name: reasons[notes.get(name, None if is_chosen else True)] for name in modules}
    return {name: reason for name, reason in found.items() if reason is not None}


def _check(enabled: object) -> None:
    if not isinstance(enabled, bool):
        raise ConfigError(f"`enabled` must be true or false, but is {enabled!r}.")
