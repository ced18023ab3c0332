"""Module hooks of units that must run on the unit's own stage: hooks that compute weights, and backward hooks.

``nn.Module.__call__`` runs hooks of a unit as code of the glue, on every stage, which is wrong for two kinds of hooks.
Units hide them from ``__call__``, and the stage that runs the unit applies them around the real ``forward``:

* torch's pruning and its older weight norm and spectral norm are forward pre-hooks that compute ``weight`` from
  ``weight_orig`` and a mask, say. Only the unit's stage has these tensors. A stand-in takes the place of each, which
  computes nothing and refuses to be removed: the parameters are distributed by then.
* Backward hooks would catch the gradient of the unit's input on one stage and that of its output on another.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import BackwardHook

from smp_strategy.errors import UnsupportedError

__all__ = [
    "hide_backward_hooks",
    "hide_weight_hooks",
    "refuse_new_weight_hooks",
    "show_backward_hooks",
    "show_weight_hooks",
    "with_backward_hooks",
    "with_weight_hooks",
]

_KINDS = (BasePruningMethod, SpectralNorm, WeightNorm)


def hide_weight_hooks(unit: nn.Module) -> dict[int, Callable[..., Any]]:
    """Hide from calls of ``unit`` its hooks that compute weights; returns them by their keys."""
    hooks = unit._forward_pre_hooks
    hidden: dict[int, Callable[..., Any]] = {key: hook for key, hook in hooks.items() if isinstance(hook, _KINDS)}
    for key, hook in hidden.items():
        kind: Any = type(hook)
        hooks[key] = object.__new__(_stand_in_of(kind))
        vars(hooks[key]).update(vars(hook))
    return hidden


def show_weight_hooks(unit: nn.Module, hidden: Mapping[int, Callable[..., Any]]) -> None:
    """Undo :func:`hide_weight_hooks`."""
    unit._forward_pre_hooks.update(hidden)


def refuse_new_weight_hooks(units: Mapping[str, nn.Module]) -> None:
    """Refuse hooks that compute weights and were registered on ``units`` since :func:`hide_weight_hooks`.

    Raises:
        UnsupportedError: there is one.
    """
    for name, unit in units.items():
        for hook in unit._forward_pre_hooks.values():
            if isinstance(hook, _KINDS) and not isinstance(hook, _HiddenHook):
                raise _refusal(f"{type(hook).__name__} was put on `{name}`")


class _HiddenHook:
    """Mixin: what calls of a unit find in the place of a hidden hook."""

    def __call__(self, *_: Any) -> None:
        """Compute nothing: the stage of the unit does."""

    def remove(self, module: nn.Module) -> None:
        """Refuse what torch's functions ask for.

        Raises:
            UnsupportedError: always.
        """
        raise _refusal(f"{type(self).__name__} was to be removed from a {type(module).__name__}")


@functools.cache
def _stand_in_of(kind: Any) -> Any:
    return type(kind.__name__, (_HiddenHook, kind), {"__module__": kind.__module__})


def _refusal(done: str) -> UnsupportedError:
    return UnsupportedError(
        f"{done} after the first step, when its parameters had been distributed over the ranks: others would neither "
        "be summed up nor saved. Do so before training begins (in `__init__` or `configure_model`), or after the run. "
        "`torch.nn.utils.parametrizations.spectral_norm`, and parametrizations of your own with one tensor, may come "
        "and go in hooks."
    )


def with_weight_hooks(
    unit: nn.Module, function: Callable[..., Any], hidden: Mapping[int, Callable[..., Any]]
) -> Callable[..., Any]:
    """Wrap ``function``, the forward of ``unit``, so that its hidden hooks run first."""
    if not hidden:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        for hook in hidden.values():
            hook(unit, args)
        return function(*args, **kwargs)

    return run


def hide_backward_hooks(unit: nn.Module) -> None:
    vars(unit)["_get_backward_hooks"] = lambda: ([], [])
    vars(unit)["_get_backward_pre_hooks"] = list


def show_backward_hooks(unit: nn.Module) -> None:
    """Undo :func:`hide_backward_hooks`."""
    del vars(unit)["_get_backward_hooks"], vars(unit)["_get_backward_pre_hooks"]


def with_backward_hooks(unit: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function``, the forward of ``unit``, in the unit's backward hooks.

    Raises:
        UnsupportedError: a hook was registered by the deprecated ``register_backward_hook``.
    """
    if not (unit._backward_hooks or unit._backward_pre_hooks):
        return function
    full, partial = nn.Module._get_backward_hooks(unit)
    if partial:
        raise UnsupportedError(
            f"A hook was registered on {type(unit).__name__} by `register_backward_hook`, which is deprecated and sees "
            "incomplete gradients. Use `register_full_backward_hook`."
        )
    before = nn.Module._get_backward_pre_hooks(unit)

    def run(*args: Any, **kwargs: Any) -> Any:
        hook = BackwardHook(unit, full, before)
        return hook.setup_output_hook(function(*hook.setup_input_hook(args), **kwargs))

    return run
