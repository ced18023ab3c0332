"""Runs a hook of the user with the full weights and gradients in sight."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.own_parameters import refusal_of_copy
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.pytree import flatten

__all__ = ["refuse_history", "run_hook"]


def run_hook(parts: EngineParts, hook: Callable[[], Any]) -> Any:
    """Run ``hook`` with a view of the full model. Collective over the ranks that have it. Its result has real tensors
    on every rank.

    Before the first step there is no view yet; it opens if the hook runs a step.
    """
    views, opened = parts.views, partial(_opened, parts)
    if views.is_open:
        return hook()
    if parts.calls.runtime is None:
        return views.run_ahead(hook, opened, lambda: parts.calls.runtime is not None)
    with opened() as real:
        try:
            return real(hook())
        except RuntimeError as error:
            if (refusal := refusal_of_copy(error)) is not None:
                raise refusal from error
            raise


def refuse_history(result: Any, call: str) -> None:
    """Refuse the result of a hook, which a ``call`` returns, if it might be expected to carry gradients."""
    if torch.is_grad_enabled() and any(map(_is_floating, flatten(result)[0])):
        raise UnsupportedError(
            f"What the function of `{call}` returns comes out without a history: a loss that it is added to "
            f"would not train the weights for it. Call `{call}` under `torch.no_grad()` if that is right; "
            "compute a penalty for weights in the `forward` of the model, or use `weight_decay` of the optimizer."
        )


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


@contextmanager
def _opened(parts: EngineParts) -> Iterator[Callable[[Any], Any]]:
    if not parts.is_spread:
        with parts.views.states.shown():
            yield lambda result: result
        return
    assert parts.calls.runtime is not None
    parts.spread.settle()
    parts.calls.in_hook = True
    try:
        with parts.layout.group.in_hook(), parts.views.opened(parts.calls.runtime) as real:
            parts.calls.program_of_hook = parts.calls.runtime.current.interpreter
            yield real
    finally:
        parts.calls.in_hook, parts.calls.program_of_hook = False, None
