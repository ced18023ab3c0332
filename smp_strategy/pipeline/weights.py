"""Where a unit finds its weights when it is called."""

from collections.abc import Callable
from typing import Any

__all__ = ["WithWeights", "weights_are_there"]

WithWeights = Callable[[str, Callable[..., Any], object], Callable[..., Any]]
"""Makes a call of a unit find its weights, which may be spread over ranks. Gets the unit's name, what to call, and
something that stands for the thread: equal for calls that are made one after the other."""


def weights_are_there(unit: str, function: Callable[..., Any], token: object) -> Callable[..., Any]:
    """They are."""
    return function
