"""Hooks that users have registered on an optimizer's step, for ranks whose optimizer sees only some of the parameters.

In one process they find all weights and gradients as they are before and after the step. So they are taken out of the
step: those before it run before a rank hides what others update, and those after it when the new values are known
everywhere, with everything in sight like any other hook.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer

from smp_strategy.errors import UnsupportedError

__all__ = ["has_step_hooks", "hooks_around_step"]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether there are any."""
    return any(_hooks(optimizer))


@contextmanager
def hooks_around_step(optimizer: Optimizer, in_sight: Callable[[Callable[[], None]], Any] | None) -> Iterator[None]:
    """A step of ``optimizer`` runs in here, and its hooks before and after it.

    Args:
        optimizer: has the hooks.
        in_sight: calls them; ``None``: they run inside of the step as usual.
    """
    if in_sight is None or not has_step_hooks(optimizer):
        yield
        return
    pre, post = ([*hooks.values()] for hooks in _hooks(optimizer))
    kept = [dict(hooks) for hooks in _hooks(optimizer)]
    steps: list[tuple[Any, Any]] = []
    for hooks in _hooks(optimizer):
        hooks.clear()
    noted = optimizer.register_step_post_hook(lambda _, args, kwargs: steps.append((args, kwargs)))
    try:
        if pre:
            in_sight(partial(_call, pre, optimizer, (optimizer,), {}))
        yield
    finally:
        noted.remove()
        for hooks, before in zip(_hooks(optimizer), kept, strict=True):
            added = dict(hooks)
            hooks.clear()
            hooks.update(before | added)
    for args, kwargs in steps if post else ():  # none if a scaler has passed over the step
        in_sight(partial(_call, post, optimizer, args, kwargs))


def _hooks(optimizer: Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    # A wrapper around another optimizer may have left `Optimizer.__init__` out.
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    pre, post = (vars(optimizer).get(name, {}) for name in names)
    return pre, post


def _call(hooks: list[Any], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for hook in hooks:
        if hook(optimizer, args, kwargs) is not None:
            raise UnsupportedError(
                f"A hook before the step of {type(optimizer).__name__} returns other arguments for it, which is not "
                "built yet for strategy 'smp' where ranks divide the parameters. Let it return None, and give the "
                "optimizer its options otherwise."
            )
