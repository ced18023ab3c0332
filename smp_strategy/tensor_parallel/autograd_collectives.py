"""What goes between ranks in forward, and what in backward: each sum has a copy as its counterpart.

On a tensor-parallel group a value is *whole* (the same on all ranks), *split* (each rank has a part of it along a dim)
or a *summand* (its sum over the ranks is meant). Forward and backward of the steps between them, as in Megatron-LM
(Shoeybi et al. 2019; Korthikanti et al. 2022)::

    function                      forward                        backward
    copy         whole -> whole   nothing                        add_up
    add_up       summand -> whole sum                            copy
    summand      whole -> summand the first rank's, else zeros   nothing
    gather       split -> whole   concatenation                  split
    split        whole -> split   this rank's part               gather
    gather_split split -> whole   concatenation                  scatter_sum
    scatter_sum  summand -> split sum, this rank's part          gather_split

``copy`` stands where each rank goes on with a whole value in its own way; ``gather`` where all go on alike;
``gather_split`` is both at once, ``copy`` of ``gather``. Since the backward of each step is another one of them, second
derivatives are right as well.

Whole tensors that parts are computed with: the gradients of several of them travel together.

Where tokens are split, a norm's weight meets the tokens of this rank only, so its gradient is a summand. The weights of
a layer are small, and one message for each would cost more than what is in it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.tensor_parallel.group import TensorGroup

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
    """``whole``, for each rank to go on with in its own way: its gradients are added up."""
    result: Tensor = _CopyToRegion.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


def copy_together(wholes: Sequence[Tensor], group: TensorGroup) -> list[Tensor]:
    """:func:`copy` of several tensors, whose gradients travel together when all of them are there."""
    return list(_CopyTogether.apply(group, *wholes))  # type: ignore[no-untyped-call]


def add_up(own: Tensor, group: TensorGroup) -> Tensor:
    """The sum of what each rank has of its ``own``, with which all go on alike; ``own`` itself is used up."""
    if not _can_change(own):
        own = own.clone(memory_format=torch.contiguous_format)
    result: Tensor = _AddUp.apply(own, group)  # type: ignore[no-untyped-call]
    return result


def summand(whole: Tensor, group: TensorGroup) -> Tensor:
    """What adds up to ``whole``, for each rank to add something of its own before the sum."""
    result: Tensor = _Summand.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


def gather(part: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """The ranks' parts behind each other, with which all go on alike."""
    result: Tensor = _Gather.apply(part, group, dim, lengths)  # type: ignore[no-untyped-call]
    return result


def split(whole: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """This rank's part of ``whole``."""
    result: Tensor = _Split.apply(whole, group, dim, lengths)  # type: ignore[no-untyped-call]
    return result


def gather_split(part: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """The ranks' parts behind each other, for each rank to go on with in its own way."""
    result: Tensor = _GatherSplit.apply(part, group, dim, lengths)  # type: ignore[no-untyped-call]
    return result


def scatter_sum(own: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """This rank's part of the sum of what each rank has of its ``own``."""
    result: Tensor = _ScatterSum.apply(own, group, dim, lengths)  # type: ignore[no-untyped-call]
    return result


def _can_change(tensor: Tensor) -> bool:
    """Whether ``tensor`` can become something else in its own memory: nobody's leaf, and nothing else's view."""
    return tensor.is_contiguous() and not tensor._is_view() and not (tensor.is_leaf and tensor.requires_grad)


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # In memory of its own: a gradient may be used elsewhere as well.
        return add_up(gradients[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _CopyTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)  # those of tensors that nobody has read do not travel
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
    """Remembers along which dim, in which parts."""

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


class _GatherSplit(_Moving):
    @staticmethod
    def forward(part: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
        return group.gather(part, dim, lengths)

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
    """Whole tensors, for each rank to use with its tokens: their gradients are added up, all in one message.

    Args:
        tensors: which.
        group: the ranks.
    """

    def __init__(self, tensors: Iterable[Tensor], group: TensorGroup) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._group = group
        self._copies: dict[int, Tensor] | None = None

    def of(self, tensor: Tensor) -> Tensor | None:
        """The copy of ``tensor``, if it is one of them."""
        if id(tensor) not in self._tensors:
            return None
        if self._copies is None:
            # Not before the first of them is used: a shard may have to be gathered.
            wanted = {number: tensor for number, tensor in self._tensors.items() if tensor.requires_grad}
            copies = copy_together(list(wanted.values()), self._group)
            self._copies = dict(zip(wanted, copies, strict=True))
        return self._copies.get(id(tensor))
