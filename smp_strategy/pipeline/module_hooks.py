"""Hooks that make a unit's weight run where the unit runs.

torch's pruning and its older weight norm and spectral norm are forward pre-hooks: before each call they make ``weight``
out of ``weight_orig`` and a mask, say. What is hooked on a unit runs with the glue, on every stage, but only the unit's
own has these tensors. So units hide such hooks there, and run them right before their ``forward``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["hide_weight_hooks", "show_weight_hooks", "with_weight_hooks"]

_KINDS = (BasePruningMethod, SpectralNorm, WeightNorm)


def hide_weight_hooks(unit: nn.Module) -> dict[int, Callable[..., Any]]:
    """Let calls of ``unit`` do without its hooks that make weights.

    Returns:
        The hooks by their keys.
    """
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
    """``function``, the forward of ``unit``, after its hidden hooks."""
    if not hidden:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        for hook in hidden.values():
            hook(unit, args)
        return function(*args, **kwargs)

    return run
