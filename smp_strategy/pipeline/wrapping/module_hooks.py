"""Module hooks of units that must run on the unit's own stage: hooks that compute weights, and backward hooks.

``nn.Module.__call__`` runs hooks of a unit as code of the glue, on every stage, which is wrong for two kinds of hooks.
Units hide them from ``__call__``, and the stage that runs the unit applies them around the real ``forward``:

* torch's pruning and its older weight norm and spectral norm are forward pre-hooks that compute ``weight`` from
  ``weight_orig`` and a mask, say. Only the unit's stage has these tensors.
* Backward hooks would catch the gradient of the unit's input on one stage and that of its output on another.
"""

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
    for key in hidden:
        del hooks[key]
    return hidden


def show_weight_hooks(unit: nn.Module, hidden: Mapping[int, Callable[..., Any]]) -> None:
    """Undo :func:`hide_weight_hooks`; these hooks come first then, since none depends on the others' arguments."""
    hooks = unit._forward_pre_hooks
    others = dict(hooks)
    hooks.clear()
    hooks.update({**hidden, **others})


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
