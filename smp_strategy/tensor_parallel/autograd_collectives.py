"""Autograd-aware collectives of tensor parallelism: each has another one of them as its backward.

On a tensor-parallel group a value is *whole* (the same on all ranks), *split* (each rank has a part along a dim) or a
*summand* (its sum over the ranks is meant). The conversions between them, as in Megatron-LM (Shoeybi et al. 2019;
Korthikanti et al. 2022)::

    function                      forward                        backward
    copy         whole -> whole   nothing                        add_up
    add_up       summand -> whole sum                            copy
    summand      whole -> summand the first rank's, else zeros   nothing
    gather       split -> whole   concatenation                  split
    split        whole -> split   this rank's part               gather
    gather_split split -> whole   concatenation                  scatter_sum
    scatter_sum  summand -> split sum, this rank's part          gather_split

``copy`` precedes code that differs between ranks; ``gather`` precedes code that is the same on all; ``gather_split`` is
both at once, ``copy`` of ``gather``. Since each backward is another one of these functions, second derivatives are
right as well.

:class:`ReplicatedWeights` joins the gradients of several whole tensors in one message. Under sequence parallelism, a
norm's weight meets the tokens of this rank only, so its gradient is a summand; the weights of a layer are small, and a
message for each would cost more than its content.
"""

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.distributed.tensor_group import TensorGroup

__all__ = [
    "ReplicatedWeights",
    "add_up",
    "copy",
    "copy_together",
    "gather",
    "gather_split",
    "scatter_sum",
    "split",
    "summand",
]


def copy(whole: Tensor, group: TensorGroup) -> Tensor:
    """``whole``, for code that differs between ranks: its gradients are all-reduced."""
    result: Tensor = _CopyToRegion.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


def copy_together(wholes: Sequence[Tensor], group: TensorGroup) -> list[Tensor]:
    """:func:`copy` of several tensors, whose gradients are all-reduced together once all of them exist."""
    return list(_CopyTogether.apply(group, *wholes))  # type: ignore[no-untyped-call]


def add_up(own: Tensor, group: TensorGroup) -> Tensor:
    """All-reduce of the ranks' ``own``, whose memory is reused; for code that is the same on all ranks."""
    if not _can_change(own):
        own = own.clone(memory_format=torch.contiguous_format)
    result: Tensor = _AddUp.apply(own, group)  # type: ignore[no-untyped-call]
    return result


def summand(whole: Tensor, group: TensorGroup) -> Tensor:
    """A tensor whose sum over the ranks is ``whole``, so that each rank can add to it before the sum."""
    result: Tensor = _Summand.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


def gather(part: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """All-gather of the ranks' parts along ``dim``, for code that is the same on all ranks."""
    result: Tensor = _Gather.apply(part, group, dim, lengths)  # type: ignore[no-untyped-call]
    return result


def split(whole: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """This rank's part of ``whole``."""
    result: Tensor = _Split.apply(whole, group, dim, lengths)  # type: ignore[no-untyped-call]
    return result


def gather_split(part: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """All-gather of the ranks' parts along ``dim``, for code that differs between ranks."""
    result: Tensor = _GatherSplit.apply(part, group, dim, lengths)  # type: ignore[no-untyped-call]
    return result


def scatter_sum(own: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """Reduce-scatter: this rank's part of the sum of the ranks' ``own``."""
    result: Tensor = _ScatterSum.apply(own, group, dim, lengths)  # type: ignore[no-untyped-call]
    return result


def _can_change(tensor: Tensor) -> bool:
    """Whether ``tensor`` can be overwritten: it is no trainable leaf and no view."""
    return tensor.is_contiguous() and not tensor._is_view() and not (tensor.is_leaf and tensor.requires_grad)


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # A copy: the gradient may be used elsewhere as well.
        return add_up(gradients[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _CopyTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)  # gradients of unused tensors are not sent
        return tuple(whole.view_as(whole) for whole in wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = list(gradients)
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        for kind in dict.fromkeys((gradients[number].dtype, gradients[number].device) for number in there):
            members = [number for number in there if (gradients[number].dtype, gradients[number].device) == kind]
            flat = add_up(torch.cat([gradients[number].reshape(-1) for number in members]), ctx.group)
            pieces = flat.split([gradients[number].numel() for number in members])
            for number, piece in zip(members, pieces, strict=True):
                found[number] = piece.view(gradients[number].shape)
        return None, *found


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        ctx.mark_dirty(own)
        return group.sum(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return copy(gradients[0], ctx.group) if torch.is_grad_enabled() else gradients[0], None


class _Summand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: TensorGroup) -> Tensor:
        return whole.view_as(whole) if group.rank == 0 else torch.zeros_like(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Moving(torch.autograd.Function):
    """Base of the functions that move parts; saves group, dim and lengths."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, *ctx.how = inputs


class _Gather(_Moving):
    @staticmethod
    def forward(part: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
        return group.gather(part, dim, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return split(gradients[0], *ctx.how), None, None, None


class _Split(_Moving):
    @staticmethod
    def forward(whole: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
        return whole.split(list(lengths), dim)[group.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gather(gradients[0], *ctx.how), None, None, None


class _GatherSplit(_Gather):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return scatter_sum(gradients[0], *ctx.how), None, None, None


class _ScatterSum(_Moving):
    @staticmethod
    def forward(own: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
        return group.scatter_sum(own, dim, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gather_split(gradients[0], *ctx.how), None, None, None


@final
class ReplicatedWeights:
    """Whole tensors that each rank uses with its own tokens: their gradients are all-reduced in one message."""

    def __init__(self, tensors: Iterable[Tensor], group: TensorGroup) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._group = group
        self._copies: dict[int, Tensor] | None = None

    def of(self, tensor: Tensor) -> Tensor | None:
        """The copy of ``tensor`` to compute with, if it is one of these tensors."""
        if id(tensor) not in self._tensors:
            return None
        if self._copies is None:
            # Only at the first use: before it, a sharded weight may not be gathered.
            wanted = {number: tensor for number, tensor in self._tensors.items() if tensor.requires_grad}
            copies = copy_together(list(wanted.values()), self._group)
            self._copies = dict(zip(wanted, copies, strict=True))
        return self._copies.get(id(tensor))
