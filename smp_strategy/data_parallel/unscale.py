"""Gradient unscaling by the loss scale, and agreement of all ranks on whether any gradient has overflowed.

A rank has gradients of its stage, its part of split layers, its pieces of sharded parameters, or of the parameters that
its replica updates; an overflow may show on a single rank only. Skipping a step is a decision of all of them, so there
is one reduction of the outcome over all ranks.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.data_parallel.sharded_gradient import ShardedGradient
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.torch_private import unscale_
from smp_strategy.precision.grad_scaler import UnscaleResult

__all__ = ["agreed", "unscale_gradients"]


def unscale_gradients(parameters: Iterable[nn.Parameter], scale: float) -> UnscaleResult:
    """Divide this rank's gradients of ``parameters`` by ``scale``; return whether they exist and are finite."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    of_halves = []
    found = UnscaleResult.NOTHING
    for parameter in parameters:
        if parameter.grad is not None:
            found = UnscaleResult.FINITE
            values = _values(parameter.grad)
            alike[values.device, values.dtype].append(values)
            if parameter.dtype == torch.float16 != values.dtype and values.numel():
                of_halves.append(values)
    overflows = []
    for (device, _), gradients in alike.items():
        overflow = torch.zeros((), device=device)
        # The kernel of PyTorch's scaler: divides and checks in one pass. Reciprocal in double precision, as there.
        inverse = torch.tensor(scale, dtype=torch.float64, device=device).reciprocal().float()
        unscale_(gradients, overflow, inverse)
        overflows.append(overflow)
    # The optimizer will get these cast to float16, like their parameters.
    overflows += [values.abs().amax() > torch.finfo(torch.float16).max for values in of_halves]
    return UnscaleResult.OVERFLOW if any(map(Tensor.item, overflows)) else found


def agreed(found: UnscaleResult, device: torch.device) -> UnscaleResult:
    """Worst result of any rank. Collective over all ranks."""
    order = list(UnscaleResult)
    worst = torch.tensor(order.index(found), dtype=torch.int32, device=device)
    collectives.reduce_numbers(worst, dist.ReduceOp.MAX, group=None, doing="whether gradients have overflowed").wait()
    return order[int(worst.item())]


def _values(gradient: Tensor) -> Tensor:
    if isinstance(gradient, ShardedGradient):
        return gradient.piece
    if gradient.is_sparse:
        values: Tensor = gradient._values()
        return values
    return gradient
