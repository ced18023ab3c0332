"""What goes between ranks in forward, and what in backward: each sum has a copy as its counterpart.

On a tensor-parallel group a value is *whole* (the same on all ranks), *split* (each rank has a part of it along a dim)
or a *summand* (its sum over the ranks is meant). Forward and backward of the steps between them, as in Megatron-LM
(Shoeybi et al. 2019; Korthikanti et al. 2022)::

    function                      forward                        backward
    copy         whole -> whole   nothing                        sum
    add_up       summand -> whole sum                            nothing
    gather       split -> whole   concatenation                  this rank's part
    split        whole -> split   this rank's part               concatenation
    gather_split split -> whole   concatenation                  sum, this rank's part
    scatter_sum  summand -> split sum, this rank's part          concatenation

``copy`` stands where each rank goes on with a whole value in its own way; ``gather`` where all go on alike;
``gather_split`` is both at once, ``copy`` of ``gather``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smp_strategy.tensor_parallel.group import TensorGroup

__all__ = ["add_up", "copy", "gather", "gather_split", "scatter_sum", "split"]


def copy(whole: Tensor, group: TensorGroup) -> Tensor:
    """``whole``, for each rank to go on with in its own way: its gradients are added up."""
    result: Tensor = _Copy.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


def add_up(summand: Tensor, group: TensorGroup) -> Tensor:
    """The sum of the ranks' ``summand``, with which all go on alike. ``summand`` is used up."""
    result: Tensor = _AddUp.apply(summand, group)  # type: ignore[no-untyped-call]
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


def scatter_sum(summand: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """This rank's part of the sum of the ranks' ``summand``."""
    result: Tensor = _ScatterSum.apply(summand, group, dim, lengths)  # type: ignore[no-untyped-call]
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # In memory of its own: a gradient may be used elsewhere as well.
        return ctx.group.sum(gradients[0].clone(memory_format=torch.contiguous_format)), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: TensorGroup) -> Tensor:
        if not summand.is_contiguous():
            return group.sum(summand.contiguous())
        ctx.mark_dirty(summand)
        return group.sum(summand)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Moving(torch.autograd.Function):
    """Remembers along which dim, in which parts."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.group, ctx.dim, ctx.lengths = inputs


def _part(whole: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    return whole.split(list(lengths), dim)[group.rank].clone(memory_format=torch.contiguous_format)


class _Gather(_Moving):
    @staticmethod
    def forward(part: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
        return group.gather(part, dim, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _part(gradients[0], ctx.group, ctx.dim, ctx.lengths), None, None, None


class _Split(_Moving):
    @staticmethod
    def forward(whole: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
        return _part(whole, group, dim, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.gather(gradients[0], ctx.dim, ctx.lengths), None, None, None


class _GatherSplit(_Moving):
    @staticmethod
    def forward(part: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
        return group.gather(part, dim, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.scatter_sum(gradients[0], ctx.dim, ctx.lengths), None, None, None


class _ScatterSum(_Moving):
    @staticmethod
    def forward(summand: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Tensor:
        return group.scatter_sum(summand, dim, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.gather(gradients[0], ctx.dim, ctx.lengths), None, None, None
