"""Weights out of the flat float32 groups that SageMaker's sharded data parallelism has in its optimizer files.

Each of ``s`` files has ``ceil(numel / s)`` elements of every parameter, one parameter behind the other; the last
elements of the last file may be padding. Names and shapes are in ``user_content.pt``::

    param_shapes  a [5]  b [2]             file 0   a0 a1 a2  b0
                                           file 1   a3 a4 __  b1
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smp_strategy.checkpoint.convert.contents import LazyTensor
from smp_strategy.errors import CheckpointError

__all__ = ["flat_weights", "shapes_in"]


def shapes_in(param_shapes: Any, source: str) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters: a dict, or a list of dicts, one per group of the optimizer.

    Raises:
        CheckpointError: it is neither.
    """
    groups = param_shapes if isinstance(param_shapes, list | tuple) else [param_shapes]
    try:
        return {str(name): tuple(map(int, shape)) for group in groups for name, shape in group.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source}: `param_shapes` is not names and shapes, but {param_shapes!r:.100}."
        ) from error


def flat_weights(groups: Sequence[Any], shapes: Mapping[str, tuple[int, ...]], source: str) -> dict[str, LazyTensor]:
    """The parameters whose pieces are in ``groups``.

    Args:
        groups: ``fp32_flat_groups`` of each file: a tensor, or a list of them.
        shapes: of all parameters, in the order of their pieces.
        source: for messages.

    Raises:
        CheckpointError: there are more or fewer elements than parameters have.
    """
    pieces = [_joined(group, source) for group in groups]
    num_files, offset = len(pieces), 0
    found: dict[str, LazyTensor] = {}
    for name, shape in shapes.items():
        length = -(-math.prod(shape) // num_files)
        found[name] = LazyTensor(shape, torch.float32, partial(_read, pieces, offset, length, shape))
        offset += length
    for number, piece in enumerate(pieces):
        if piece.numel() != offset:
            raise CheckpointError(
                f"{source}: `fp32_flat_groups` of optimizer file {number} has {piece.numel()} elements, but "
                f"`param_shapes` with {num_files} files makes it {offset}. A file may be lacking, or be of another run."
            )
    return found


def _joined(group: Any, source: str) -> Tensor:
    flat = [group] if isinstance(group, LazyTensor) else group
    if not isinstance(flat, list | tuple) or not all(isinstance(tensor, LazyTensor) for tensor in flat):
        raise CheckpointError(f"{source}: `fp32_flat_groups` is no list of tensors.")
    values = [tensor.read().reshape(-1).float() for tensor in flat]
    return values[0] if len(values) == 1 else torch.cat(values or [torch.empty(0)])


def _read(pieces: Sequence[Tensor], offset: int, length: int, shape: tuple[int, ...]) -> Tensor:
    values = torch.cat([piece.narrow(0, offset, length) for piece in pieces])
    return values[: math.prod(shape)].view(shape)
