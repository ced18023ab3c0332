"""``set_tensor_parallelism``, ``tensor_parallelism``: the user includes modules in the split, or excludes them.

Both have the names of SageMaker's library::

    smp_strategy.set_tensor_parallelism(model.head, False)     # a module and everything in it now

    with smp_strategy.tensor_parallelism():                    # every module that is created in here
        self.encoder = Encoder()

A later call overrides an earlier one, so contexts may be nested (the innermost wins) and single layers set after the
whole model. A module without a setting follows its parent. Without any setting, everything that can be split is; if a
module outside of a disabled one is enabled, only enabled modules are. Copies of a module keep its setting.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import nn

from smp_strategy.errors import ConfigError
from smp_strategy.model.annotations import ModuleNotes

__all__ = ["disabled", "is_enabled", "set_tensor_parallelism", "tensor_parallelism"]

_ENABLED = ModuleNotes[bool]("_smp_tensor_parallel")

Module = TypeVar("Module", bound=nn.Module)


def set_tensor_parallelism(module: Module, enabled: bool = True) -> Module:
    """Enable or disable the split of ``module`` and everything that it contains now; returns ``module``.

    A later call, or a later ``tensor_parallelism`` context, overrides this one.

    Raises:
        ConfigError: ``enabled`` is not a bool.
    """
    _check(enabled)
    _ENABLED.leave_on(module, enabled)
    return module


def tensor_parallelism(enabled: bool = True) -> AbstractContextManager[None]:
    """Context that enables or disables the split of all modules created in it.

    Contexts may be nested: the innermost wins.

    Raises:
        ConfigError: ``enabled`` is not a bool.
    """
    _check(enabled)
    return _ENABLED.on_new(enabled)


def is_enabled(module: nn.Module) -> bool:
    """Whether the user has enabled the split of ``module`` itself."""
    return _ENABLED.of(module) is True


def disabled(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Modules that the user's settings exclude, with the reason.

    Args:
        modules: All modules by qualified name, parents first.
    """
    notes: dict[str, bool] = {}
    # Setting of the outermost ancestor that has one.
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
