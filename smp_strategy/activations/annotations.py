"""``set_activation_checkpointing``: checkpointing requested by hand on modules of an existing model.

Units are unknown while a model is built, so the request is only stored as an attribute of the module, which copies
keep; :mod:`smp_strategy.activations.selection` applies it when the model is partitioned. The name and the parameters
are SageMaker's.
"""

from typing import NamedTuple, TypeVar, final

from torch import nn

from smp_strategy.config.activation_options import group_size
from smp_strategy.errors import ConfigError
from smp_strategy.model.annotations import ModuleNotes

__all__ = ["CheckpointRequest", "asked_for", "set_activation_checkpointing"]


@final
class CheckpointRequest(NamedTuple):
    """The user's request for one module."""

    strategy: str
    preserve_rng_state: bool


_ASKED = ModuleNotes[CheckpointRequest]("_smp_checkpointing")

Module = TypeVar("Module", bound=nn.Module)


def set_activation_checkpointing(
    module: Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> Module:
    """Checkpoint ``module``: it keeps its inputs only and recomputes the rest in backward. Returns ``module``.

    For a module that contains units, each of its units is checkpointed, by itself or in groups. A module inside a unit
    is checkpointed within that unit.

    Args:
        module: Any part of the model. For the whole model use the option `activation_checkpointing`.
        preserve_rng_state: Draw the same random numbers when recomputing.
        pack_args_as_tuple: Accepted for scripts of SageMaker and ignored: a module's own ``forward`` decides what
            its parts get.
        strategy: For the parts of an ``nn.Sequential`` and for units: ``each`` by itself, all that follow each
            other on a stage together (``contiguous``), or N of them (``group_N``).

    Raises:
        ConfigError: ``strategy`` is none of these.
    """
    if group_size(strategy) == 0:
        raise ConfigError(f"`strategy` must be each, contiguous or group_N with N from 1 on, but is {strategy!r}.")
    _ASKED.leave_on_alone(module, CheckpointRequest(strategy, preserve_rng_state))
    return module


def asked_for(module: nn.Module) -> CheckpointRequest | None:
    """The user's request for ``module`` itself, if there is one."""
    return _ASKED.of(module)
