"""Parameters that are of half precision already, and have no float32 master although ``bf16`` or ``fp16`` promises one.

Most updates of a weight are smaller than the distance to the next half-precision number, and vanish. Models come so
without anybody having said it: loaded with the dtype of their checkpoint, or made under another default dtype. They may
be looked at, and frozen ones may stay as they are (under adapters, say), but what is trained is refused.

Gradients of half-precision parameters are added up in float32.

Microbatches and accumulated batches bring many small gradients, which half precision would lose in their sum. Autograd
can have gradients of another dtype than their parameter, and then casts each before it is added. All that happens
between backward and the optimizer's step, sums over ranks, the global norm, scaling, happens to these. The optimizer
itself computes with parameter, gradient and state of one dtype, so for its step it gets the sum rounded once.
"""

from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import nn

from smp_strategy.config.precision_options import PrecisionOptions
from smp_strategy.errors import ConfigError
from smp_strategy.precision.dtypes import gradient_dtype

__all__ = ["Fp32Gradients", "parameters_without_masters", "refuse_trained", "set_gradient_dtype"]


def parameters_without_masters(module: nn.Module, options: PrecisionOptions) -> dict[str, nn.Parameter]:
    """Those of ``module`` that are of half precision although ``options`` ask for float32 masters, by name."""
    if not (options.bf16 or options.fp16):
        return {}
    return {name: each for name, each in module.named_parameters() if gradient_dtype(each.dtype) != each.dtype}


def refuse_trained(parameters: Mapping[str, nn.Parameter], options: PrecisionOptions) -> None:
    """Training begins.

    Raises:
        ConfigError: one of these ``parameters``, which have no masters, is trained.
    """
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not trained:
        return
    option = "bf16" if options.bf16 else "fp16"
    dtype = str(parameters[trained[0]].dtype).removeprefix("torch.")
    others = f" (and {len(trained) - 1} more)" if len(trained) > 1 else ""
    instead = "bf16-true" if dtype == "bfloat16" else "16-true"
    raise ConfigError(
        f"`{trained[0]}`{others} is trained, but is {dtype} already, so that `{option}=True` has no float32 master of "
        "it, and small updates would be lost. Convert the module with `float()`, or load it in float32 "
        f"(`dtype=torch.float32`), before optimizers are made; or freeze it; or leave `{option}` out and train without "
        f"masters, under the Trainer's `precision={instead!r}`."
    )


def set_gradient_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let the gradient of ``parameter`` be of ``dtype`` from now on; one that is there is cast."""
    gradient, parameter.grad = parameter.grad, None
    # Also where it is so already: by default it would follow the parameter's own dtype, which may change.
    parameter.grad_dtype = dtype
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


@final
class Fp32Gradients:
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
