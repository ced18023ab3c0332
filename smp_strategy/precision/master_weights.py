"""Parameters that are of half precision already, and have no float32 master although ``bf16`` or ``fp16`` promises one.

Most updates of a weight are smaller than the distance to the next half-precision number, and vanish. Models come so
without anybody having said it: loaded with the dtype of their checkpoint, or made under another default dtype. They may
be looked at, and frozen ones may stay as they are (under adapters, say), but what is trained is refused.
"""

from collections.abc import Mapping

from torch import nn

from smp_strategy.config.precision_options import PrecisionOptions
from smp_strategy.errors import ConfigError
from smp_strategy.precision.dtypes import gradient_dtype

__all__ = ["parameters_without_masters", "refuse_trained"]


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
