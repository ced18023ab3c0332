"""Hooks on gradients run where the gradients are.

``nn.Module.__call__`` puts backward hooks around ``forward``, which for a unit is code of the glue: the gradient
of the input would be caught on one stage and that of the output on another. So units hide their backward hooks there,
and the stage that runs the unit puts them around the real ``forward``.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import BackwardHook

from smp_strategy.errors import UnsupportedError

__all__ = ["hide_backward_hooks", "show_backward_hooks", "with_backward_hooks"]


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
