"""Asynchronous broadcast of updated parameters: units wait for theirs when they are next called.

Once an optimizer has stepped, the next forward can begin before all values have arrived: a unit waits for its own
parameters when it is called, while those of later units still travel. Everything else that might look at a parameter
until then, be it code above the units, a hook or a callback that saves weights, must not get the old value. So a
parameter is guarded while it waits (:mod:`smp_strategy.model.guarded_tensors`): metadata and gradients are answered at
once, all other uses wait for the values.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import final

import torch
from torch import nn

from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.model.guarded_tensors import (
    BY_IDENTITY,
    GRADIENT,
    HARMLESS,
    Guard,
    guard_of,
    in_plain_sight,
    unwatch,
    watch,
)

__all__ = ["ParameterBroadcast"]


@final
class ParameterBroadcast:
    """Values that are on their way to this rank."""

    def __init__(self) -> None:
        self._under_way: list[Handle[None]] = []

    def expect(self, parameters: Sequence[nn.Parameter], finish: Callable[[], None]) -> None:
        """Hide ``parameters`` until ``finish`` has waited for their values and filled them in."""
        if all(type(parameter) is nn.Parameter for parameter in parameters):
            work = Handle(partial(_fill_in, parameters, finish))
            self._under_way.append(work)
            guard = _Awaited(work)
            for parameter in parameters:
                watch(parameter, guard)
        else:  # a class of the user's, which may mean something
            with torch.no_grad():
                finish()

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for those of ``parameters`` that are on their way."""
        for parameter in parameters if self._under_way else ():
            if isinstance(guard := guard_of(parameter), _Awaited):
                guard.lift()
        self._under_way = [work for work in self._under_way if not work.is_done()]

    def wait(self) -> None:
        """Wait for all parameters."""
        wait_for(self._under_way)
        self._under_way = []


def _fill_in(parameters: Sequence[nn.Parameter], finish: Callable[[], None]) -> None:
    # If another rank is gone this raises, now and whenever the parameters are used again.
    with torch.inference_mode(False), torch.no_grad(), in_plain_sight():
        finish()
    for parameter in parameters:
        unwatch(parameter)


@final
class _Awaited(Guard):
    """Guard of parameters whose new values are on their way: a use waits for them."""

    free = HARMLESS | GRADIENT | BY_IDENTITY

    def __init__(self, work: Handle[None]) -> None:
        self._work = work

    def lift(self) -> None:
        """Wait for the values."""
        self._work.wait()
