"""Step hooks, closures and modes of optimizers, for ranks whose optimizer sees only some of the parameters.

Hooks that users have registered on an optimizer's step find, in a single process, all weights and gradients as they are
before and after the step. So they are taken out of the step: hooks before it run before a rank hides the parameters
that others update, and hooks after it when the new values are known everywhere, with everything in sight like any other
hook.

Closures, which evaluate the loss, may be called once per step.

Schedule-free optimizers train one point, have an average evaluated, and exchange them in ``train`` and ``eval``. The
exchange changes all weights by state that is kept for each of them, so ranks do it together, each for the parameters
that it updates (Defazio et al. 2024).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer

from smp_strategy.errors import UnsupportedError

__all__ = ["MODES", "evaluated_once", "has_step_hooks", "has_to_switch", "hooks_around_step"]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` has hooks on its step."""
    return any(_hooks(optimizer))


@contextmanager
def hooks_around_step(optimizer: Optimizer, in_sight: Callable[[Callable[[], None]], Any] | None) -> Iterator[None]:
    """Context of a step of ``optimizer``, whose hooks run before and after it.

    Args:
        optimizer: Optimizer with the hooks.
        in_sight: Calls the hooks; ``None``: they run inside of the step as usual.
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


def evaluated_once(closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
    """Wrap ``closure`` so that it refuses to be called again.

    An optimizer that evaluates the loss again does so at weights that it has changed by means of all gradients (a line
    search, a perturbation of a given norm); on a rank it has those of one stage.
    """
    calls = 0

    def once() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise UnsupportedError(
                f"The optimizer {type(optimizer).__name__} evaluates the loss several times per step, which is not "
                "built yet for strategy 'smp': it would decide by the gradients of one stage. Use an optimizer that "
                "calls its closure once."
            )
        return closure()

    return once


MODES = ("train", "eval")


def has_to_switch(optimizer: Optimizer, mode: str) -> bool:
    """Whether a call of the method ``mode`` would change anything."""
    wanted = {group.get("train_mode", mode != "train") for group in optimizer.param_groups}
    return callable(getattr(optimizer, mode, None)) and wanted != {mode == "train"}
