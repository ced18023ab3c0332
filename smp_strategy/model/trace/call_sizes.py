"""Numbers of a call by which calls of one kind differ: sizes and strides of its tensors, and large plain integers.

Two calls with the same *shape kind* have the same arguments but for these numbers.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["numbers_of", "shape_kind", "with_numbers"]

# Smaller integers are dims, flags and factors: code branches on them.
_SMALL = 8
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def shape_kind(leaf: Any, key: object) -> object:
    """Flattened argument without its numbers.

    Args:
        leaf: Argument; a tensor is given by its metadata.
        key: Hashable form of the whole argument.
    """
    if isinstance(leaf, TensorSpec):
        return TensorSpec, len(leaf.size), leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) is torch.Size:
        return torch.Size, len(leaf)
    if type(leaf) is slice:
        return slice, *(int if _is_number(bound) else bound for bound in _bounds(leaf))
    return int if _is_number(leaf) else key


def numbers_of(leaf: Any) -> tuple[Any, ...]:
    """Numbers of a flattened argument or result, which may be symbolic."""
    if isinstance(leaf, TensorSpec):
        return *leaf.size, *leaf.stride
    if type(leaf) is torch.Size:
        return tuple(leaf)
    if type(leaf) is slice:
        return tuple(bound for bound in _bounds(leaf) if _is_number(bound))
    return (leaf,) if _is_number(leaf) else ()


def with_numbers(leaf: Any, numbers: Iterator[Any]) -> Any:
    """``leaf`` with others for its numbers, which are taken from ``numbers``."""
    if isinstance(leaf, TensorSpec):
        size = tuple(next(numbers) for _ in leaf.size)
        return replace(leaf, size=size, stride=tuple(next(numbers) for _ in leaf.stride))
    if type(leaf) is torch.Size:
        return torch.Size([next(numbers) for _ in leaf])
    if type(leaf) is slice:
        return slice(*(next(numbers) if _is_number(bound) else bound for bound in _bounds(leaf)))
    return next(numbers) if _is_number(leaf) else leaf


def _bounds(leaf: slice) -> tuple[Any, Any, Any]:
    return leaf.start, leaf.stop, leaf.step


def _is_number(leaf: Any) -> bool:
    return (type(leaf) is int and abs(leaf) > _SMALL) or isinstance(leaf, _SYMBOLIC)
