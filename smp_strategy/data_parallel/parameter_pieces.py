"""Sharded parameters between their uses: their class, their gradient, and views of runs of their elements.

Sharded gradient: tensor with the shape of a sharded parameter, of which this rank has a piece.

``.grad`` of a parameter must have its shape. Operations on gradients between backward and the optimizer's step are
elementwise, as a rule: they are added to those of earlier batches, scaled, clamped, or set to zero. All that is done to
the piece here, without communication. Operations that need the whole gradient, its norm for instance, are refused: a
number computed from a piece would be plausible and wrong.

Conversion between shaped tensors and runs of elements in a flat buffer, without copies where possible.

A parameter is a view of its buffer, and pieces that already stand behind each other in one tensor are recognised as
that tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.data_parallel.flat_layout import Slot
from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.torch_private import disabled_torch_function
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import SIZES, Guard

__all__ = ["RestingGuard", "ShardedGradient", "common_base", "elements", "lost_writes", "view"]


# [Note: resting parameters]
#
# A sharded parameter is one object for its whole life, because user code, optimizers and hooks hold it. Its memory and
# its class change:
#
#     state       class               memory                        from .. to
#     RESTING     GuardedParameter    a single NaN, expanded        otherwise
#     GATHERED    its own             view of the gathered buffer   wait .. free: forward and backward
#     PIECES      its own             this rank's elements, 1-D     show_pieces .. hide_pieces: optimizer
#     WHOLE       its own             memory of its own             show_whole .. hide_whole: hooks of the user
#
# A resting parameter answers questions of metadata (`smp_strategy.model.guarded_tensors`). For all other operations
#   * while a hook of the user runs, the first use makes all parameters whole (collective: the hook runs on all ranks,
#     and the first use on one is the first on all);
#   * otherwise it raises.


@final
@dataclass
class RestingGuard(Guard):
    """Reaction to the use of resting parameters.

    Attributes:
        make_whole: Gives all parameters their values; ``None``: the use is refused.
        asked: Asks for the values where uses are refused; returns whether they are there now.
        sizes: Whether asking for a size counts as a use: a whole parameter has another size.
    """

    make_whole: Callable[[], None] | None = None
    sizes: bool = False

    def __init__(self) -> None:
        self.asked: Callable[[], bool] = lambda: False

    def ask(self) -> bool:
        """Ask for the values outside of hooks."""
        return self.asked()

    @property
    def can_lift(self) -> bool:
        """Whether a hook of the user runs."""
        return self.make_whole is not None

    def lift(self) -> None:
        """Make all parameters whole."""
        assert self.make_whole is not None
        self.make_whole()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operation; see [Note: resting parameters]."""
        if self.sizes and self.can_lift and func in SIZES:
            # Before the metadata is read, since the class and the shape change with it.
            self.lift()
            return func(*args, **kwargs)
        return super().call(func, args, kwargs)

    def describe(self, tensor: Tensor) -> str:
        """Shape of ``tensor``, whose values are not needed."""
        return f"Parameter({list(tensor.shape)}, spread over ranks)"

    def refusal(self, operation: str) -> UnsupportedError:
        """Error for an operation outside of hooks."""
        words = door_words()
        return UnsupportedError(
            f"`{operation}` needs the values of a parameter that is spread over ranks (`sharded_data_parallel_degree`) "
            "and is not in use. Compute with it in the module that has it, or from the first step of its kind on, or "
            f"{words.in_hook}, where weights are whole; to save the model, call {words.save_model} on all ranks; to "
            'have the whole model after a run, set `restore_module="all"`.'
        )


def lost_writes(names: Sequence[str]) -> UnsupportedError:
    """Error for units that write to their sharded parameters ``names``."""
    return UnsupportedError(
        f"`{names[0]}`{f' and {len(names) - 1} more' * (len(names) > 1)} is written to by its own "
        "layer as it computes, or by a hook on that, but its values are put together from shards for each use, "
        "and what is written would be lost. Change it after the optimizer's step (in `on_train_batch_end`), "
        "compute with a changed copy (`torch.nn.utils.parametrizations`), or train without "
        "`sharded_data_parallel_degree`."
    )


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
        f"(`sharded_data_parallel_degree`), needs all of it. Do it {words.in_hook}, where "
        f"gradients are whole; to clip by the norm, use {words.clip}."
    )


def view(flat: Tensor, slot: Slot) -> Tensor:
    """View of the parameter in ``slot`` of a flat buffer."""
    return flat.as_strided(slot.entry.shape, slot.entry.stride, slot.offset)


def elements(tensor: Tensor, slot: Slot) -> Tensor:
    """Elements of ``tensor`` in the memory order of the parameter in ``slot``."""
    tensor = tensor.detach()
    if tensor.stride() != slot.entry.stride:
        ordered = torch.empty_strided(tensor.shape, slot.entry.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def common_base(pieces: Sequence[Tensor | None], places: Sequence[int], shard: Tensor) -> Tensor | None:
    """Tensor like ``shard`` that all ``pieces`` are views of, if there is one."""
    storage = None
    for piece, place in zip(pieces, places, strict=True):
        if piece is None:
            return None
        if not piece.numel():
            continue
        own = piece.untyped_storage()
        storage = storage or own
        is_view = own.data_ptr() == storage.data_ptr() and piece.storage_offset() == place
        if not is_view or own.nbytes() != shard.nbytes or piece.dtype != shard.dtype:
            return None
    return None if storage is None else shard.new_empty(0).set_(storage, 0, shard.shape, (1,))
