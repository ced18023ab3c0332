"""Runs a hook of the user with the full weights and gradients in sight."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.own_parameters import refusal_of_copy

__all__ = ["run_hook"]


def run_hook(parts: EngineParts, hook: Callable[[], Any]) -> Any:
    """Run ``hook`` with a view of the full model. Collective over the ranks that have it.

    Before the first step there is no view yet; it opens if the hook runs a step.

    Returns:
        The result of ``hook``, with real tensors on every rank.
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
