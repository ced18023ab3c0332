"""Sums of gradients over ranks.

Two kinds of parameters exist on several ranks. A parameter that several stages hold (tied weights, parameters of the
glue) gets a part of its gradient on each of them: the parts are added. Every parameter exists once per replica: the
replicas' gradients are averaged.

A parameter may have a gradient on one rank and none on another (it was unused in this step there). The ranks agree
first on what exists anywhere; where a rank has nothing it contributes zeros, and where nobody has anything the
gradient stays ``None``, as in one process.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from smp_strategy.buckets import buckets

__all__ = ["average_gradients", "present_anywhere", "sum_gradients"]


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up the gradients of parameters that every rank of ``group`` holds; all get the same bits."""
    _reduce(parameters, group, scale=1.0)


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients over the ranks of ``group``."""
    _reduce(parameters, group, scale=1.0 / dist.get_world_size(group))


def present_anywhere(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[nn.Parameter]:
    """Those that have a gradient on some rank of ``group``; on the others they get one of zeros. Collective."""
    if not parameters:
        return []
    present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    present = present.to(parameters[0].device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    members = [parameter for parameter, here in zip(parameters, present.tolist(), strict=True) if here]
    for parameter in members:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return members


def _reduce(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, scale: float) -> None:
    if dist.get_world_size(group) == 1:
        return
    members = present_anywhere(parameters, group)
    gradients = [parameter.grad for parameter in members if parameter.grad is not None]
    for numbers in buckets(gradients):
        bucket = [gradients[number] for number in numbers]
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        if scale != 1.0:
            flat.mul_(scale)
        for gradient, piece in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(piece.view(gradient.shape))
