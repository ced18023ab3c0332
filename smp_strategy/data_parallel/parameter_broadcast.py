"""Asynchronous broadcast of updated parameters: units wait for theirs when they are next called.

Once an optimizer has stepped, the next forward can begin before all values have arrived: a unit waits for its own
parameters when it is called, while those of later units still travel. Everything else that might look at a parameter
until then, be it code above the units, a hook or a callback that saves weights, must not get the old value. So a
parameter changes its class while it waits, as parameters of other stages do
(:mod:`smp_strategy.model.guarded_tensors`): metadata and gradients are answered at once, all other uses wait for the
values.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.model.guarded_tensors import BY_IDENTITY, GRADIENT, HARMLESS, in_plain_sight

__all__ = ["ParameterBroadcast"]

# Attribute of a parameter that holds the work it waits for.
_ARRIVAL = "_smp_arrival"


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
            for parameter in parameters:
                setattr(parameter, _ARRIVAL, work)
                parameter.__class__ = _Arriving
        else:  # a class of the user's, which may mean something
            with torch.no_grad():
                finish()

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for those of ``parameters`` that are on their way."""
        for parameter in parameters if self._under_way else ():
            if isinstance(parameter, _Arriving):
                _wait_for(parameter)
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
        parameter.__class__ = nn.Parameter
        delattr(parameter, _ARRIVAL)


@final
class _Arriving(nn.Parameter):
    """Parameter whose new value is on its way. Never constructed: parameters take this class and leave it again."""

    # Placed tensors leave operations that involve such a tensor to this class.
    has_home = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HARMLESS or func in GRADIENT or func in BY_IDENTITY:
            with in_plain_sight():
                return func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, _Arriving):
                _wait_for(leaf)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        _wait_for(self)
        copied: Tensor = self.__deepcopy__(memo)  # of its class now
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for(self)
        return self.__reduce_ex__(protocol)


def _wait_for(parameter: nn.Parameter) -> None:
    work: Handle[None] = vars(parameter)[_ARRIVAL]
    work.wait()
