"""Calls of units go through the runtime; hooks that the user registered on them stay outside of it.

The ``forward`` of each unit is replaced on the instance, so ``unit(...)`` still runs its hooks, on every stage, with
placed tensors. Nothing else of the model is touched.
"""

import dataclasses
import functools
import types
from typing import Any, final

import torch
from torch import nn

from smp_strategy.pipeline.backward_hooks import hide_backward_hooks
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.trace.prediction import Callee
from smp_strategy.units import Unit

__all__ = ["UnitCalls"]


@final
class UnitCalls:
    """The way from the model's calls to the runtime.

    Attributes:
        runtime: who answers calls of units; ``None``: the units themselves, as if nothing had been replaced.
    """

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self._callees: dict[str, Callee] = {}

    def intercept(self, unit: Unit) -> None:
        """Let calls of ``unit`` come here."""
        original = unit.module.forward
        self._callees[unit.name] = Callee(unit.name, original, unit.module)

        @functools.wraps(original)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not unit.module:
                # A copy of the model (an average of weights, say) took this method along, and is no unit.
                return types.MethodType(getattr(original, "__func__", type(module).forward), module)(*args, **kwargs)
            if self.runtime is None:
                return original(*args, **kwargs)
            return self.runtime.call_unit(self._callees[unit.name], args, kwargs)

        unit.module.forward = types.MethodType(forward, unit.module)
        hide_backward_hooks(unit.module)

    def compile(self, name: str) -> None:
        """Let the unit ``name`` run through ``torch.compile`` from now on."""
        callee = self._callees[name]
        self._callees[name] = dataclasses.replace(callee, compiled=torch.compile(callee.function))
