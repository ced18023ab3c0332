"""Float32 master weights, and float32 sums of gradients of half-precision parameters.

Parameters that already have half precision cannot get the float32 masters that ``bf16`` or ``fp16`` promise. Most
updates of a weight are smaller than the distance to the next half-precision number, and would vanish. Models are like
this without anyone having asked for it: loaded with the dtype of their checkpoint, or built under another default
dtype. Inference is allowed, and frozen parameters may stay (under adapters, say), but training them is refused.

Gradients of half-precision parameters are added up in float32: microbatches and accumulated batches contribute many
small gradients, whose sum would lose them in half precision. A gradient that comes alone needs no sum, and stays as it
is. When a second one comes, the first is widened, and from then on autograd adds each in place: the addition itself
converts, so that there is no copy of a summand. What computes with the sum (over ranks, the global norm, scaling) has
it in float32. The optimizer itself needs parameter, gradient and state in one dtype, so for its step the sum is rounded
once.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smp_strategy.config.precision_options import PrecisionOptions
from smp_strategy.errors import ConfigError
from smp_strategy.precision.dtypes import gradient_dtype, is_half

__all__ = [
    "Fp32Gradients",
    "add_in",
    "parameters_without_masters",
    "refuse_trained",
    "set_gradient_dtype",
    "widened",
]


def parameters_without_masters(module: nn.Module, options: PrecisionOptions) -> dict[str, nn.Parameter]:
    """Half-precision parameters of ``module``, by name, if ``options`` ask for float32 masters."""
    if not (options.bf16 or options.fp16):
        return {}
    return {name: each for name, each in module.named_parameters() if is_half(each.dtype)}


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


def add_in(parameter: nn.Parameter, dtype: torch.dtype) -> RemovableHandle:
    """Let autograd add up future gradients of ``parameter`` in a wider ``dtype``, until the handle is removed."""
    parameter.grad_dtype = None  # any: the first one stays as it comes
    alive = weakref.ref(parameter)

    def widen(_: Tensor) -> None:
        # Called before a gradient is added.
        owner = alive()
        if owner is not None and owner.grad is not None and owner.grad.dtype != dtype:
            owner.grad = owner.grad.to(dtype)

    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # hooks are for trained ones, and it may be trained later
    handle = parameter.register_hook(widen)
    parameter.requires_grad_(is_trained)
    return handle


def widened(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """``gradient`` of ``parameter`` in the dtype in which its gradients are added up."""
    dtype = gradient_dtype(parameter)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


@final
class Fp32Gradients:
    """Float32 sums of the gradients of half-precision parameters, from construction on."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._handles = {each: add_in(each, torch.float32) for each in parameters if is_half(each.dtype)}

    def widen(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before something computes with gradients of ``parameters``: all of them are in float32 afterwards."""
        for parameter in self._among(parameters):
            if parameter.grad is not None:
                parameter.grad = widened(parameter, parameter.grad)

    def begin_update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Round the gradients before an optimizer of ``parameters`` steps. They stay so until another one is added."""
        for parameter in self._among(parameters):
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype)

    def end(self) -> None:
        """Make the parameters ordinary ones again."""
        for parameter, handle in self._handles.items():
            handle.remove()
            set_gradient_dtype(parameter, parameter.dtype)
        self._handles.clear()

    def _among(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [each for each in parameters if each in self._handles] if self._handles else []
