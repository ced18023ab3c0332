"""Float32 master weights and float32 gradients of half-precision parameters.

Parameters that already have half precision cannot get the float32 masters that ``bf16`` or ``fp16`` promise. Most
updates of a weight are smaller than the distance to the next half-precision number, and would vanish. Models are like
this without anyone having asked for it: loaded with the dtype of their checkpoint, or built under another default
dtype. Inference is allowed, and frozen parameters may stay (under adapters, say), but training them is refused.

Gradients of half-precision parameters accumulate in float32: microbatches and accumulated batches contribute many small
gradients, whose sum would lose them in half precision. Autograd supports gradients in another dtype than the
parameter's, and casts each before adding it. Everything between backward and the optimizer's step (sums over ranks, the
global norm, scaling) works on these. The optimizer itself needs parameter, gradient and state in one dtype, so for its
step the sum is rounded once.
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
    """Half-precision parameters of ``module``, by name, if ``options`` ask for float32 masters."""
    if not (options.bf16 or options.fp16):
        return {}
    return {name: each for name, each in module.named_parameters() if gradient_dtype(each.dtype) != each.dtype}


def refuse_trained(parameters: Mapping[str, nn.Parameter], options: PrecisionOptions) -> None:
    """Check before training begins.

    Raises:
        ConfigError: One of these ``parameters``, which have no masters, is trained.
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
    """Set the dtype of future gradients of ``parameter``, and cast the present one."""
    gradient, parameter.grad = parameter.grad, None
    # Set even if equal: by default it would follow the parameter's own dtype, which may change.
    parameter.grad_dtype = dtype
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


@final
class Fp32Gradients:
    """Float32 gradients of half-precision parameters, from construction on.

    Args:
        parameters: Parameters of any dtype; those of half precision are affected.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [each for each in parameters if gradient_dtype(each.dtype) != each.dtype]
        self._known = set(self._parameters)
        self._widen(self._parameters)

    def begin_update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Round the gradients before an optimizer of ``parameters`` steps."""
        for parameter in self._among(parameters):
            set_gradient_dtype(parameter, parameter.dtype)

    def end_update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Return to float32 gradients after the step."""
        self._widen(self._among(parameters))

    def end(self) -> None:
        """Make the parameters ordinary ones again."""
        self.begin_update(self._parameters)
        self._known.clear()
        self._parameters.clear()

    def _among(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [each for each in parameters if each in self._known] if self._known else []

    def _widen(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            set_gradient_dtype(parameter, gradient_dtype(parameter.dtype))
