"""What surrounds a call and is no part of the module or its arguments: autocast, and the state of random streams.

A second run of the call must find both as the first has. Where a call's random numbers begin at a seed of its own, the
caller brings them back (:class:`~smp_strategy.activations.unit_wrapper.UnitCall`); a part of a unit is called in the
midst of the unit's stream, whose state is noted here.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

__all__ = ["autocast_of_now", "random_of_now"]

Again = Callable[[], AbstractContextManager[Any]]
"""Opens a context in which something is once more as it was."""


def autocast_of_now(device: torch.device) -> Again:
    """Autocast as it is set now, for the processor and for ``device``."""
    keeps_casts = torch.is_autocast_cache_enabled()
    settings = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys(("cpu", device.type))
    ]

    def again() -> ExitStack:
        stack = ExitStack()
        for kind, is_on, dtype in settings:
            if is_on or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, is_on, keeps_casts))
        return stack

    return again


def random_of_now(device: torch.device, *, only_torch: bool = False) -> Again:
    """The random streams as they are now; afterwards they go on as if nothing had been drawn.

    Args:
        device: whose stream belongs to them, beside those of PyTorch, Python and numpy.
        only_torch: leave out the last two, which take much longer.
    """
    return partial(_drawn_from, device, _states(device, only_torch), only_torch)


@contextmanager
def _drawn_from(device: torch.device, states: tuple[Any, ...], only_torch: bool) -> Iterator[None]:
    now = _states(device, only_torch)
    _set_states(device, states)
    try:
        yield
    finally:
        _set_states(device, now)


def _states(device: torch.device, only_torch: bool) -> tuple[Any, ...]:
    of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    others = (None, None) if only_torch else (random.getstate(), np.random.get_state())
    return torch.default_generator.get_state(), of_device, *others


def _set_states(device: torch.device, states: tuple[Any, ...]) -> None:
    of_torch, of_device, of_python, of_numpy = states
    torch.default_generator.set_state(of_torch)
    if of_device is not None:
        torch.get_device_module(device).set_rng_state(of_device, device)
    if of_python is not None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
