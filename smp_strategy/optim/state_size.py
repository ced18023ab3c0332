"""How many bytes an optimizer will keep for each of its parameters, before its first step.

Any optimizer may be used, so it is asked: a twin with the same options takes one step with a small stand-in of the
parameter. Each dim of the stand-in has a size of its own, so the shape of a state tensor says which dims it follows:
for a parameter of 5 x 7 a moment is 5 x 7, the rows of Adafactor are 5 x 1.
"""

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.optim.twin import take_step, twin_of

__all__ = ["optimizer_state_bytes"]

_log = logging.getLogger(__name__)

_SIZES = (5, 7, 11, 13, 17, 19, 23, 29)
MOMENTS_IF_UNKNOWN = 2

StateShapes = list[tuple[tuple[int, ...], int]]
"""Of each state tensor: its shape for the stand-in, and bytes per element."""


def optimizer_state_bytes(optimizers: Iterable[Optimizer]) -> dict[int, int]:
    """Bytes of state after the first step, by ``id`` of the parameter; frozen ones have none.

    Where an optimizer cannot be asked, two moments per parameter are assumed.
    """
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            known: dict[object, StateShapes | None] = {}
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                kind = (parameter.ndim, parameter.dtype)
                if kind not in known:
                    known[kind] = _ask(optimizer, parameter)
                shapes = known[kind]
                size = MOMENTS_IF_UNKNOWN * parameter.nbytes
                if shapes is not None:
                    size = sum(_scaled(shape, parameter.shape) * itemsize for shape, itemsize in shapes)
                found[id(parameter)] = found.get(id(parameter), 0) + size
    return found


def _ask(optimizer: Optimizer, parameter: Tensor) -> StateShapes | None:
    stand_in = nn.Parameter(torch.ones(_SIZES[: parameter.ndim], dtype=parameter.dtype))
    stand_in.grad = torch.ones_like(stand_in)
    try:
        twin = twin_of(optimizer, parameter, stand_in)
        take_step(twin)
        tensors = [leaf for leaf in twin.state[stand_in].values() if isinstance(leaf, Tensor)]
    except Exception as error:
        _log.debug(
            "%s cannot be asked what it keeps of %d-dimensional parameters (%s: %s). Two moments are assumed.",
            type(optimizer).__name__,
            parameter.ndim,
            type(error).__name__,
            error,
        )
        return None
    return [(tuple(tensor.shape), tensor.element_size()) for tensor in tensors]


def _scaled(shape: tuple[int, ...], real: tuple[int, ...]) -> int:
    """Elements of a state tensor with ``shape`` for the stand-in, for a parameter of shape ``real``."""
    sizes = dict(zip(_SIZES, real, strict=False))
    elements = 1
    for size in shape:
        elements *= _unfolded(size, sizes)
    return elements


def _unfolded(size: int, sizes: Mapping[int, int]) -> int:
    """A dim of a state tensor may be some dims of the parameter, flattened."""
    found = 1
    for small, large in sizes.items():
        if size % small == 0:
            size, found = size // small, found * large
    return found * size
