"""Steps of optimizers under the engine, as all doors make them: step hooks, closures, modes.

Hooks that users have registered on an optimizer's step find, in a single process, all weights and gradients as they
are before and after the step. So they are taken out of the step: hooks before it run before a rank hides the
parameters that others update, and hooks after it when the new values are known everywhere, with everything in sight
like any other hook.

Closures, which evaluate the loss, may be called once per step.

Schedule-free optimizers train one point, have an average evaluated, and exchange them in `train` and `eval`. The
exchange changes all weights by state that is kept for each of them, so ranks do it together, each for the parameters
that it updates (Defazio et al. 2024).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.distributed.rendezvous import meet
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.patching import Patches

__all__ = [
    "evaluated_first",
    "evaluated_once",
    "has_step_hooks",
    "hooks_around_step",
    "switch_mode",
    "switching_together",
    "trains",
    "updating",
]


def trains(optimizer: Optimizer, module: nn.Module) -> bool:
    own = {id(parameter) for parameter in module.parameters()}
    return any(id(each) in own for group in optimizer.param_groups for each in group["params"])


@contextmanager
def updating(engine: Engine, optimizer: Optimizer, *, in_sight: bool = True) -> Iterator[Tensor | None]:
    """Context of a step of ``optimizer``, whose gradients are final. Collective; arguments: :func:`hooks_around_step`.

    Gives the norm that :meth:`~smp_strategy.engine.engine.Engine.begin_update` returns.
    """
    with hooks_around_step(engine, optimizer, in_sight=in_sight), engine.views.put_aside():
        yield engine.begin_update(optimizer)
        engine.end_update(optimizer)


def has_step_hooks(optimizer: Optimizer) -> bool:
    return any(_hooks(optimizer))


@contextmanager
def hooks_around_step(engine: Engine, optimizer: Optimizer, *, in_sight: bool = True) -> Iterator[None]:
    """Context of a step of ``optimizer``, whose hooks run before and after it, if ranks divide the parameters.

    Unless hooks can see all weights now (``in_sight``) they run inside of the step as usual.
    """
    if not in_sight or not engine.inspection.divides_updates or not has_step_hooks(optimizer):
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
            engine.run_hook(partial(_call, pre, optimizer, (optimizer,), {}))
        yield
    finally:
        noted.remove()
        for hooks, before in zip(_hooks(optimizer), kept, strict=True):
            added = dict(hooks)
            hooks.clear()
            hooks.update(before | added)
    for args, kwargs in steps if post else ():  # none if a scaler has passed over the step
        engine.run_hook(partial(_call, post, optimizer, args, kwargs))


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


def evaluated_first(closure: Callable[[], Any] | None, optimizer: Any) -> Callable[[], Any] | None:
    """Evaluate ``closure``, so that its gradients can be made final; returns the closure for the optimizer."""
    if closure is None:
        return None
    result = closure()
    return evaluated_once(lambda: result, optimizer)


def switch_mode(
    engine: Engine | None,
    optimizer: Optimizer,
    mode: str,
    switch: Callable[[], Any],
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """Switch ``optimizer`` to training weights, or to averaged ones. Collective if that changes weights.

    ``switch`` is the method ``mode``, which is ``train`` or ``eval``; ``together`` makes a context in which ranks meet.
    """
    wanted = {group.get("train_mode", mode != "train") for group in optimizer.param_groups}
    if engine is None or not callable(getattr(optimizer, mode, None)) or wanted == {mode == "train"}:
        return switch()
    with together():
        meet(f"optimizer.{mode}")
    with engine.changing_weights(optimizer):
        return switch()


@contextmanager
def switching_together(engine: Engine, optimizers: Iterable[Sequence[Any]]) -> Iterator[None]:
    """Context in which ``train`` and ``eval`` of optimizers, called by hooks of the user, take all ranks.

    Each of ``optimizers`` has the wrappers around it behind it.
    """
    with Patches() as patches:
        for optimizer, *wrappers in optimizers:
            for mode in ("train", "eval"):
                if callable(method := getattr(optimizer, mode, None)):
                    switch = wraps(method)(partial(switch_mode, engine, optimizer, mode, method))
                    for owner in (optimizer, *wrappers):
                        patches.put(owner, mode, switch)
        yield
