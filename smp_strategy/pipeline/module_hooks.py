"""Hooks that make a unit's weight run where the unit runs.

torch's pruning and its older weight norm and spectral norm are forward pre-hooks: before each call they make ``weight``
out of ``weight_orig`` and a mask, say. What is hooked on a unit runs with the glue, on every stage, but only the unit's
own has these tensors. So units hide such hooks there, and run them right before their ``forward``.

Hooks on gradients run where the gradients are.

``nn.Module.__call__`` puts backward hooks around ``forward``, which for a unit is code of the glue: the gradient
of the input would be caught on one stage and that of the output on another. So units hide their backward hooks there,
and the stage that runs the unit puts them around the real ``forward``.
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


def hide_backward_hooks(unit: nn.Module) -> None:
    """Let calls of ``unit`` do without its backward hooks."""
    vars(unit)["_get_backward_hooks"] = lambda: ([], [])
    vars(unit)["_get_backward_pre_hooks"] = list


def show_backward_hooks(unit: nn.Module) -> None:
    """Undo :func:`hide_backward_hooks`."""
    del vars(unit)["_get_backward_hooks"], vars(unit)["_get_backward_pre_hooks"]


def with_backward_hooks(unit: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, the forward of ``unit``, with the unit's backward hooks around it.

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
