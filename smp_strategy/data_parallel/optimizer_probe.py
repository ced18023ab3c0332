"""How many bytes an optimizer will keep for each of its parameters, before its first step.

Any optimizer may be used, so it is asked: a twin with the same options takes one step with a small stand-in of the
parameter. Each dim of the stand-in has a size of its own, so the shape of a state tensor says which dims it follows:
for a parameter of 5 x 7 a moment is 5 x 7, the rows of Adafactor are 5 x 1.
"""

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.data_parallel.twin import take_step, twin_of

__all__ = ["StateSize", "moments", "optimizer_state_bytes", "optimizer_state_sizes"]

_log = logging.getLogger(__name__)

_SIZES = (5, 7, 11, 13, 17, 19, 23, 29)
MOMENTS_IF_UNKNOWN = 2


@final
@dataclass(frozen=True)
class StateSize:
    """What optimizers keep of a parameter."""

    shapes: tuple[tuple[tuple[int, ...], int], ...]
    """Of each state tensor: its shape for the stand-in, and bytes per element."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes for a parameter of ``shape``, which has as many dims as the stand-in."""
        return sum(_scaled(of_state, shape) * itemsize for of_state, itemsize in self.shapes)


def optimizer_state_bytes(optimizers: Iterable[Optimizer]) -> dict[int, int]:
    """Bytes of state after the first step, by ``id`` of the parameter; frozen ones have none."""
    parameters = {id(each): each for optimizer in optimizers for each in _trained(optimizer)}
    sizes = optimizer_state_sizes(optimizers)
    return {number: sizes[number].nbytes(parameter.shape) for number, parameter in parameters.items()}


def optimizer_state_sizes(optimizers: Iterable[Optimizer], in_pieces: Container[int] = ()) -> dict[int, StateSize]:
    """What optimizers keep after their first step, by ``id`` of the parameter; nothing of frozen ones.

    Where an optimizer cannot be asked, two moments per parameter are assumed.

    Args:
        optimizers: what trains the parameters.
        in_pieces: ``id`` of the parameters of which an optimizer will see one-dimensional pieces.
    """
    found: dict[int, StateSize] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            known: dict[object, StateSize] = {}
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                kind = (1 if id(parameter) in in_pieces else parameter.ndim, parameter.dtype)
                if kind not in known:
                    known[kind] = _ask(optimizer, parameter, *kind)
                before = found.get(id(parameter), StateSize(()))
                found[id(parameter)] = StateSize(before.shapes + known[kind].shapes)
    return found


def moments(ndim: int, itemsize: int) -> StateSize:
    """What is assumed where nothing is known."""
    return StateSize(((_SIZES[:ndim], itemsize),) * MOMENTS_IF_UNKNOWN)


def _trained(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.requires_grad)


def _ask(optimizer: Optimizer, parameter: Tensor, ndim: int, dtype: torch.dtype) -> StateSize:
    stand_in = nn.Parameter(torch.ones(_SIZES[:ndim], dtype=dtype))
    stand_in.grad = torch.ones_like(stand_in)
    try:
        twin = twin_of(optimizer, parameter, stand_in)
        take_step(twin)
        tensors = [leaf for leaf in twin.state[stand_in].values() if isinstance(leaf, Tensor)]
    except Exception as error:
        _log.debug(
            "%s cannot be asked what it keeps of %d-dimensional parameters (%s: %s). Two moments are assumed.",
            type(optimizer).__name__,
            ndim,
            type(error).__name__,
            error,
        )
        return moments(ndim, dtype.itemsize)
    return StateSize(tuple((tuple(tensor.shape), tensor.element_size()) for tensor in tensors))


def _scaled(shape: Sequence[int], real: Sequence[int]) -> int:
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
