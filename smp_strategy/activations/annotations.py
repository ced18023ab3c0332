"""Checkpointing that the user asks for by hand, on modules of a model that is built already.

Nothing is known of units while a model is built, so it is only noted, as an attribute of the module, which copies keep.
What becomes of it is decided when the layout is: :mod:`smp_strategy.activations.selection`. The name and the parameters
are SageMaker's.
"""

from typing import NamedTuple, TypeVar, final

from torch import nn

from smp_strategy.config.options import group_size
from smp_strategy.errors import ConfigError
from smp_strategy.model.annotations import ModuleNotes

__all__ = ["CheckpointRequest", "asked_for", "set_activation_checkpointing"]


@final
class CheckpointRequest(NamedTuple):
    """What the user has asked for a module."""

    strategy: str
    preserve_rng_state: bool


_ASKED = ModuleNotes[CheckpointRequest]("_smp_checkpointing")

Module = TypeVar("Module", bound=nn.Module)


def set_activation_checkpointing(
    module: Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> Module:
    """Let ``module`` keep its inputs only, and compute what backward needs once more; returns ``module``.

    A module that holds units has them do so, each for itself or in groups. One inside of a unit does so within it.

    Args:
        module: any part of the model; not the model itself, for which there is the option `activation_checkpointing`.
        preserve_rng_state: draw the same random numbers again.
        pack_args_as_tuple: for scripts of SageMaker; a module's own ``forward`` says what its parts are given.
        strategy: for the parts of an ``nn.Sequential`` and for units: ``each`` by itself, all that follow each other on
            a stage together (``contiguous``), or N of them (``group_N``).

    Raises:
        ConfigError: ``strategy`` is none of these.
    """
    if group_size(strategy) == 0:
        raise ConfigError(f"`strategy` must be each, contiguous or group_N with N from 1 on, but is {strategy!r}.")
    _ASKED.leave_on_alone(module, CheckpointRequest(strategy, preserve_rng_state))
    return module


def asked_for(module: nn.Module) -> CheckpointRequest | None:
    """What the user has asked for ``module`` itself."""
    return _ASKED.of(module)
