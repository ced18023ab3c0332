"""Gradients of half-precision parameters are added up in float32.

Microbatches and accumulated batches bring many small gradients, which half precision would lose in their sum. Autograd
can have gradients of another dtype than their parameter, and then casts each before it is added. All that happens
between backward and the optimizer's step, sums over ranks, the global norm, scaling, happens to these. The optimizer
itself computes with parameter, gradient and state of one dtype, so for its step it gets the sum rounded once.
"""

from collections.abc import Iterable
from typing import final

import torch
from torch import nn

from smp_strategy.precision.dtypes import gradient_dtype

__all__ = ["WideGradients", "set_gradient_dtype"]


def set_gradient_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let the gradient of ``parameter`` be of ``dtype`` from now on; one that is there is cast."""
    gradient, parameter.grad = parameter.grad, None
    # Also where it is so already: by default it would follow the parameter's own dtype, which may change.
    parameter.grad_dtype = dtype
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


@final
class WideGradients:
    """See the module docstring. In force from the construction on.

    Args:
        parameters: of any dtype.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [each for each in parameters if gradient_dtype(each.dtype) != each.dtype]
        self._known = set(self._parameters)
        self._widen(self._parameters)

    def begin_update(self, parameters: Iterable[nn.Parameter]) -> None:
        """An optimizer of ``parameters`` is about to step."""
        for parameter in self._among(parameters):
            set_gradient_dtype(parameter, parameter.dtype)

    def end_update(self, parameters: Iterable[nn.Parameter]) -> None:
        """It has."""
        self._widen(self._among(parameters))

    def end(self) -> None:
        """The parameters are ordinary ones again."""
        self.begin_update(self._parameters)
        self._known.clear()
        self._parameters.clear()

    def _among(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [each for each in parameters if each in self._known] if self._known else []

    def _widen(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            set_gradient_dtype(parameter, gradient_dtype(parameter.dtype))
