"""What hooks inside a unit collect for the code above it.

A hook on a module *inside* a unit may put what it sees into a list that a context variable holds, itself or in a dict:
so Hugging Face models gather attention maps and router logits from all layers. The hook runs on the unit's stage only,
yet code above the units uses the list on every stage. So what a unit adds to such lists is taken for a part of its
result, and added to them again on every stage.
"""

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

from smp_strategy.trace.prediction import Callee

__all__ = ["with_collected"]


def with_collected(callee: Callee, call: Callable[[Callee], Any]) -> Any:
    """Return ``call(callee)``, and let every stage have what ``callee`` collects.

    Args:
        callee: a unit.
        call: calls what it is given, on the stage where it belongs.
    """
    lists = _lists()
    if not lists:
        return call(callee)
    result, collected = call(
        dataclasses.replace(
            callee,
            key=(callee.key, len(lists)),
            function=_collecting(callee.function),
            compiled=callee.compiled and _collecting(callee.compiled),
        )
    )
    for target, items in zip(lists, collected, strict=True):
        target.extend(items)
    return result


def _collecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, returning what it adds to the lists next to its result instead."""

    def run(*args: Any, **kwargs: Any) -> tuple[Any, list[list[Any]]]:
        lists = _lists()
        lengths = [len(items) for items in lists]
        collected: list[list[Any]] = []
        try:
            result = function(*args, **kwargs)
        finally:
            for items, length in zip(lists, lengths, strict=True):
                collected.append(items[length:])
                del items[length:]
        return result, collected

    return run


def _lists() -> list[list[Any]]:
    """The lists that context variables hold now, in an order that is the same on every stage."""
    context = contextvars.copy_context()
    found: list[list[Any]] = []
    for variable in sorted(context, key=lambda variable: variable.name):
        value = context[variable]
        values = value.values() if isinstance(value, dict) else (value,)
        found += [item for item in values if isinstance(item, list)]
    return found
