"""Gradient sums over the ranks of a group, after backward.

A parameter may have a gradient on one rank and none on another (it was unused in this step there). The ranks agree
first on which gradients exist anywhere; a gradient that no rank has stays ``None``, as in a single process.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from smp_strategy.data_parallel.bucketed_all_reduce import Bucket, BucketedAllReduce
from smp_strategy.data_parallel.sparse_sums import is_sparse, sum_sparse
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.buckets import buckets
from smp_strategy.distributed.collectives.interface import JoinedSums

__all__ = ["alike", "sum_gradients"]


def alike(parameters: Sequence[nn.Parameter], most_bytes: int | None = None) -> list[Bucket]:
    """Buckets of at most ``most_bytes``, whose sums all ranks get; ``None``: buckets of the usual size."""
    runs = buckets(parameters) if most_bytes is None else buckets(parameters, most_bytes)
    return [[[parameters[number] for number in run]] for run in runs]


def sum_gradients(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    *,
    factor: float = 1.0,
    dealt_out: Callable[[Sequence[nn.Parameter]], list[Bucket]] = alike,
    dtype: torch.dtype | None = None,
    joined: JoinedSums | None = None,
) -> None:
    """Set gradients to ``factor`` times their sum over the ranks of ``group``. Collective.

    Args:
        parameters: Parameters that every rank holds.
        group: Ranks to sum over.
        factor: Factor of the sums; one over the number of ranks for averages.
        dealt_out: Puts parameters into buckets; ranks that do not get a sum are left without a gradient. If all ranks
            get all sums, these have the same bits.
        dtype: Dtype in which gradients are sent; ``None``: that in which they are summed on each rank.
        joined: Sums of dense gradients; ``None``: all-reduces of the backend.
    """
    if dist.get_world_size(group) == 1 or not parameters:
        return
    dense, sparse = _present_anywhere(parameters, group)
    if dense:
        sums = BucketedAllReduce(dealt_out(dense), group, factor=factor, dtype=dtype, joined=joined)
        sums.send_rest()
        found, _, _ = sums.finish()
        for parameter in dense:
            parameter.grad = found.get(parameter)
    here = dist.get_rank(group)
    own = [share for bucket in dealt_out(sparse) for share in (bucket if len(bucket) == 1 else bucket[here : here + 1])]
    kept = {parameter for share in own for parameter in share}
    for parameter in sparse:
        total = sum_sparse(parameter, group, factor)
        parameter.grad = total if parameter in kept else None


def _present_anywhere(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that have a gradient on some rank of ``group``, and those whose gradients are all sparse."""
    kinds = [0 if each.grad is None else 2 if is_sparse(each.grad) else 1 for each in parameters]
    present = torch.tensor(kinds, dtype=torch.uint8, device="cpu")
    # Not a reduction, which gloo would take for one of the sums of a rank that has gone on to these.
    found = [torch.empty_like(present) for _ in range(dist.get_world_size(group))]
    collectives.all_gather(found, present, group=group, doing="which gradients there are").wait()
    everyones = torch.stack(found)
    are_dense = (everyones == 1).any(0).tolist()
    are_sparse = (everyones == 2).any(0).tolist()
    dense, sparse = list[nn.Parameter](), list[nn.Parameter]()
    for parameter, is_dense, is_also_sparse in zip(parameters, are_dense, are_sparse, strict=True):
        if is_dense:
            dense.append(parameter)
        elif is_also_sparse:
            sparse.append(parameter)
    return dense, sparse
