"""Which samples are along a dim of a tensor, after operations that rearrange them.

``z - z.roll(1, 0)`` computes with two samples, although each tensor has one in each row. Indices and masks are told by
what they select, since a step may compute them twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["are_numbers", "change_of_order", "entries_of"]

_PARTS = ("chunk", "split", "tensor_split", "narrow")


def change_of_order(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], source: Tensor, dim: int, number: int
) -> str | None:
    """What an operation does to the order of the samples along ``dim``; empty: nothing; ``None``: unknown.

    Args:
        source: the first argument with samples.
        dim: their dim in it.
        number: position of the result among all results.
    """
    if name == "__getitem__":
        return _taken(args[1], dim, source)
    if name in ("roll", "flip"):
        place = 2 if name == "roll" else 1
        dims = kwargs.get("dims", args[place] if len(args) > place else None)
        if name == "flip" and are_numbers(args[1:]):
            dims = args[1:]
        dims = [dims] if isinstance(dims, int) else dims
        return f"{name} {args[1:]} {kwargs}" if dims is None or dim in {each % source.ndim for each in dims} else ""
    if name not in (*_PARTS, "index_select"):
        return ""
    place = 2 if name in _PARTS and name != "narrow" else 1
    if kwargs.get("dim", args[place] if len(args) > place else 0) % source.ndim != dim:
        return ""
    return f"{name} {args[1:]} {kwargs} {number}" if name in _PARTS else None


def entries_of(index: Sequence[Any], ndim: int) -> list[Any]:
    """``index`` with an entry for each dim, and ``None`` for new ones."""
    has_ellipsis = any(each is Ellipsis for each in index)
    missing, found = ndim - sum(map(_width, index)) + has_ellipsis, list[Any]()
    for each in index:
        found += [slice(None)] * missing if each is Ellipsis else [each]
    return found if has_ellipsis else found + [slice(None)] * missing


def are_numbers(values: Sequence[Any]) -> bool:
    """Whether ``values`` are several integers."""
    return len(values) > 1 and all(type(each) is int for each in values)


def _width(entry: Any) -> int:
    """Number of dims that an entry of an index takes."""
    return entry.ndim if isinstance(entry, Tensor) and entry.dtype == torch.bool else int(entry is not None)


def _taken(index: Any, dim: int, source: Tensor) -> str | None:
    """Which samples an index takes along ``dim``."""
    position = 0
    for entry in entries_of(index if isinstance(index, tuple) else (index,), source.ndim):
        if not position <= dim < position + _width(entry):
            position += _width(entry)
        elif isinstance(entry, slice):
            return "" if entry == slice(None) else repr(entry)
        elif type(entry) is not Tensor or entry.is_meta:
            return None  # of one sample, or by values of the model
        else:
            taken = entry.nonzero()[:, dim - position] if entry.dtype == torch.bool else entry
            numbers = taken.flatten().tolist()
            return "" if numbers == list(range(source.shape[dim])) else repr(numbers)
    return None
