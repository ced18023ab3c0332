"""Dtypes of mixed precision: parameters as stored, as units see them, gradients as accumulated and reduced.

=====================  =================  ==============  ==========  =============================
options                stored and saved   units compute   gradients   summed over replicas, shards
=====================  =================  ==============  ==========  =============================
none                   float32            float32         float32     float32, or ``reduce_dtype``
``bf16``, ``fp16``     float32: masters   half            float32     float32, or ``reduce_dtype``
``fp16_params``        float16            float16         float32     float32, or ``reduce_dtype``
=====================  =================  ==============  ==========  =============================

A half-precision number has 8 or 11 significant bits: later summands of a sum, and small updates of a weight, are lost.
So every accumulation is in float32, even where a model's own parameters have half precision, unless
``gradient_dtype=parameter`` asks for PyTorch's own sums. Kernels of matrix products take half-precision factors and
accumulate in float32 by themselves.

A parameter shows how its gradients are added: with ``grad_dtype=None`` autograd takes them in any dtype, and they are
added up in float32 (:mod:`smp_strategy.precision.master_weights`); otherwise they have the parameter's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smp_strategy.config.precision_options import GradientDtype, PrecisionOptions

__all__ = [
    "FLOATS",
    "compute_dtype",
    "dtypes_in_use",
    "gradient_dtype",
    "halve",
    "halved",
    "is_half",
    "kept_in_full",
    "reduce_dtype",
    "summed_dtype",
]

_HALVES = frozenset({torch.float16, torch.bfloat16})
FLOATS = _HALVES | {torch.float32, torch.float64}
"""Dtypes that are cast; narrower ones have a meaning of their own."""


def compute_dtype(options: PrecisionOptions) -> torch.dtype | None:
    """Dtype in which units compute; ``None``: that of their parameters."""
    if options.bf16:
        return torch.bfloat16
    return torch.float16 if options.fp16 or options.fp16_params else None


def reduce_dtype(options: PrecisionOptions) -> torch.dtype | None:
    """Dtype in which gradients are summed over ranks; ``None``: that in which each rank accumulates them."""
    return None if options.reduce_dtype is None else getattr(torch, options.reduce_dtype)


def is_half(dtype: torch.dtype) -> bool:
    return dtype in _HALVES


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Dtype in which gradients of ``parameter`` are added up, once a step has begun."""
    is_widened = is_half(parameter.dtype) and parameter.grad_dtype != parameter.dtype
    return torch.float32 if is_widened else parameter.dtype


def summed_dtype(dtype: torch.dtype, of_halves: GradientDtype) -> torch.dtype:
    """Dtype in which gradients of parameters with ``dtype`` are added up, by the option ``gradient_dtype``."""
    return torch.float32 if is_half(dtype) and of_halves == "float32" else dtype


def kept_in_full(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of ``module`` that keep their dtype where its units compute in half precision.

    Norms with running statistics accept half-precision inputs beside float32 weights, and average their statistics over
    so many steps that a half-precision average would stand still.
    """
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            yield from part.parameters(recurse=False)


def dtypes_in_use(module: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Parameters of ``module`` that units see in another dtype than they are stored in, by name.

    Args:
        module: A unit, or a module that contains units.
        dtype: Dtype in which units compute, see :func:`compute_dtype`.
    """
    if dtype is None:
        return {}
    full = set(map(id, kept_in_full(module)))
    named = [(name, each) for name, each in module.named_parameters() if id(each) not in full]
    return {name: dtype for name, each in named if each.dtype in FLOATS and each.dtype != dtype}


def halve(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters of ``module`` themselves to the half-precision ``dtype``; buffers keep theirs."""
    full = set(kept_in_full(module))
    for parameter in module.parameters():
        if parameter.dtype == torch.float32 and parameter not in full:
            parameter.grad = None  # would be of another dtype
            parameter.data = parameter.data.to(dtype)


@contextmanager
def halved(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context in which the parameters of ``module`` have a half-precision ``dtype``; gradients are dropped."""
    before = [(parameter, parameter.data) for parameter in module.parameters()]
    halve(module, dtype)
    try:
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
