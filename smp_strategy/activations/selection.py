"""Selection of the units to checkpoint, from the options and from requests made by hand.

A pattern of the option `activation_checkpointing` is a module name, with wildcards, or a class name. A module that
contains units stands for all of them; one inside a unit stands for itself. Of nested modules only the outermost counts:
recomputing a part again while the whole is recomputed would cost time and save nothing. Requests made by hand override
the options.

``set_activation_checkpointing``: checkpointing requested by hand on modules of an existing model.

Units are unknown while a model is built, so the request is only stored as an attribute of the module, which copies
keep; it is applied when the model is partitioned. The name and the parameters are SageMaker's.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar, final

from torch import nn

from smp_strategy.activations.policy import KEEP, ActivationPolicies, ActivationPolicy
from smp_strategy.config.activation_options import ActivationOptions, group_size
from smp_strategy.errors import ConfigError
from smp_strategy.model.annotations import ModuleNotes
from smp_strategy.model.units import Unit

__all__ = ["CheckpointSelection", "choose", "CheckpointRequest", "asked_for", "set_activation_checkpointing"]


@final
class CheckpointSelection(NamedTuple):
    """Modules that are recomputed, with their policies."""

    units: ActivationPolicies
    inside: ActivationPolicies
    """Modules inside units, by qualified name."""


def choose(options: ActivationOptions, root: nn.Module, units: Sequence[Unit]) -> CheckpointSelection:
    """Policies for ``units``, from ``options`` and the requests on modules of ``root``.

    Raises:
        ConfigError: A pattern fits no module, or an option has no effect because nothing is recomputed.
    """
    ordinary = ActivationPolicy(
        recompute="cheap" if options.selective_checkpointing else "all",
        group=group_size(options.checkpoint_strategy),
        preserve_rng_state=options.preserve_rng_state,
    )
    chosen = CheckpointSelection({}, {})
    for name in _outermost(_named(options, root)):
        chosen = _with(chosen, units, name, ordinary)
    if options.activation_checkpointing == "all":
        chosen = CheckpointSelection({unit.name: ordinary for unit in units}, {})
    for name, module in root.named_modules():
        asked = asked_for(module)
        if asked is not None:
            by_hand = replace(ordinary, group=group_size(asked.strategy), preserve_rng_state=asked.preserve_rng_state)
            chosen = _with(chosen, units, name, by_hand, parts=module if isinstance(module, nn.Sequential) else None)
    if not any(chosen) and options.selective_checkpointing and options.activation_checkpointing == "none":
        raise ConfigError(
            "`selective_checkpointing` has no effect, because nothing is computed again. Set "
            "`activation_checkpointing`, or leave it out."
        )
    if options.offload_activations and options.activation_checkpointing != "auto":
        offloaded = chosen.units or dict.fromkeys((unit.name for unit in units), KEEP)
        chosen = chosen._replace(units={name: replace(each, offload=True) for name, each in offloaded.items()})
    return chosen


def _with(
    chosen: CheckpointSelection,
    units: Sequence[Unit],
    name: str,
    policy: ActivationPolicy,
    parts: nn.Sequential | None = None,
) -> CheckpointSelection:
    """``chosen`` with ``policy`` for the module ``name``: for the units in it, or for itself inside a unit."""
    held = {unit.name: policy for unit in units if _is_in(unit.name, name)}
    if held:
        return chosen._replace(units={**chosen.units, **held})
    if not any(_is_in(name, unit.name) for unit in units):
        return (
            chosen  # code above the units, without units of its own: every stage runs it, and it keeps next to nothing
        )
    names = [name] if parts is None else [f"{name}.{child}" for child, _ in parts.named_children()]
    return chosen._replace(inside={**chosen.inside, **dict.fromkeys(names, policy)})


def _named(options: ActivationOptions, root: nn.Module) -> Iterator[str]:
    """Modules that the patterns name."""
    names = {name: module for name, module in root.named_modules() if name}
    for pattern in options.checkpointing_patterns:
        found = [name for name, module in names.items() if fnmatchcase(name, pattern) or pattern in _classes(module)]
        if not found:
            known = {*names, *(kind for module in names.values() for kind in _classes(module))}
            near = difflib.get_close_matches(pattern, known, n=1)
            raise ConfigError(
                f"`activation_checkpointing` names {pattern!r}, but the model has no module of such a name or class."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        yield from found


def _outermost(names: Iterator[str]) -> list[str]:
    found = dict.fromkeys(names)
    return [name for name in found if not any(name != other and _is_in(name, other) for other in found)]


def _is_in(name: str, other: str) -> bool:
    """Whether the module ``name`` is ``other``, or is contained in it."""
    return not other or name == other or name.startswith(f"{other}.")


def _classes(module: nn.Module) -> set[str]:
    kinds = type(module).__mro__
    return {kind.__name__ for kind in kinds} | {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}


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
