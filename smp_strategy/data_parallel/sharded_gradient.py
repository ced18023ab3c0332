"""Sharded gradient: tensor with the shape of a sharded parameter, of which this rank has a piece.

``.grad`` of a parameter must have its shape. Operations on gradients between backward and the optimizer's step are
elementwise, as a rule: they are added to those of earlier batches, scaled, clamped, or set to zero. All that is done to
the piece here, without communication. Operations that need the whole gradient, its norm for instance, are refused: a
number computed from a piece would be plausible and wrong.
"""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.torch_private import disabled_torch_function
from smp_strategy.errors import UnsupportedError

__all__ = ["ShardedGradient"]

# Elementwise operations without the tag `pointwise`.
_ELEMENTWISE = frozenset({"aten::zero_", "aten::fill_", "aten::copy_", "aten::zeros_like", "aten::empty_like"})
_WHOLE = ("norm", "max", "powsum")


@final
class ShardedGradient(Tensor):
    """Gradient of a sharded parameter.

    Args:
        like: The parameter, which determines the shape.
        piece: This rank's elements, one-dimensional.
        start: Index of the first of them in the parameter, in memory order.
        is_used: Whether this rank has computed a part of the gradient; otherwise all of it comes from other ranks.
    """

    piece: Tensor
    start: int
    is_used: bool

    @staticmethod
    def __new__(cls, like: Tensor, piece: Tensor, *, start: int, is_used: bool) -> "ShardedGradient":
        made: ShardedGradient = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=piece.dtype, device=piece.device
        )
        made.piece, made.start = piece, start
        made.is_used = is_used
        return made

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"ShardedGradient({list(self.shape)}, of which {self.piece.numel()} elements are on this rank)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedGradient))
        name = func._schema.name
        if name in ("aten::detach", "aten::alias"):
            return first.with_piece(first.piece)
        lists = [arg for arg in args if isinstance(arg, (list, tuple))]
        together = (
            zip(*lists, strict=True) if name.startswith("aten::_foreach_") else [pytree.tree_leaves((args, kwargs))]
        )
        if not _is_elementwise(func) or not all(_fit(leaves) for leaves in together):
            raise _refusal(name.removeprefix("aten::"), first)
        real_args, real_kwargs = pytree.tree_map_only(ShardedGradient, lambda leaf: leaf.piece, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        if _is_in_place(func):
            return args[0] if result is not None else None
        return pytree.tree_map_only(Tensor, first.with_piece, result)

    def with_piece(self, piece: Tensor) -> "ShardedGradient":
        """Gradient with another piece at the same place."""
        return ShardedGradient(self, piece, start=self.start, is_used=self.is_used)


def _is_elementwise(func: Any) -> bool:
    name = func._schema.name
    if name.startswith("aten::_foreach_"):
        return _is_in_place(func) and not any(word in name for word in _WHOLE)
    return torch.Tag.pointwise in func.tags or name in _ELEMENTWISE


def _is_in_place(func: Any) -> bool:
    return bool(func._schema.name.endswith("_"))


def _fit(leaves: Iterable[Any]) -> bool:
    """Whether this rank has the same elements of all tensors among ``leaves`` (zero-dimensional ones excepted)."""
    leaves = list(leaves)
    places = {(leaf.start, leaf.piece.numel()) for leaf in leaves if isinstance(leaf, ShardedGradient)}
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, ShardedGradient)]
    return len(places) <= 1 and all(other.ndim == 0 for other in others)


def _refusal(operation: str, gradient: Tensor) -> UnsupportedError:
    words = door_words()
    return UnsupportedError(
        f"`{operation}` of a gradient of shape {list(gradient.shape)}, which is spread over ranks "
        "(`sharded_data_parallel_degree`), needs all of it. Do it {words.in_hook}, where "
        f"gradients are whole; to clip by the norm, use {words.clip}."
    )
