"""Sums of sparse gradients over the ranks of a group.

``nn.Embedding(sparse=True)`` has a gradient of the rows that a batch has used, and optimizers such as SparseAdam update
these rows only. So the sum over ranks must be sparse as well: it has the rows that any rank has used. Each rank gathers
the rows of all others, and adds them in the order of the ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.distributed import watched_collectives as collectives

__all__ = ["is_sparse", "may_be_sparse", "sum_sparse"]

_SUMS = "sums of sparse gradients"


def may_be_sparse(module: nn.Module) -> bool:
    """Whether the gradients of the module's own parameters may be sparse, as of an embedding made with ``sparse``."""
    return bool(getattr(module, "sparse", False))


def sum_sparse(parameter: nn.Parameter, group: dist.ProcessGroup, factor: float) -> Tensor:
    """``factor`` times the sum of the gradients of ``parameter``, which are sparse or missing. Collective."""
    num_ranks, gradient = dist.get_world_size(group), parameter.grad
    if gradient is None:
        no_rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        gradient = torch.sparse_coo_tensor(no_rows, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape)
    gradient = gradient.coalesce()
    counts = [torch.zeros(1, dtype=torch.int64, device=gradient.device) for _ in range(num_ranks)]
    mine = torch.tensor([gradient.indices().shape[1]], dtype=torch.int64, device=gradient.device)
    collectives.all_gather(counts, mine, group=group, doing=_SUMS).wait()
    sizes = [int(count) for count in counts]
    indices = _gathered(gradient.indices().T, sizes, group)
    values = _gathered(gradient.values(), sizes, group)
    summed = torch.sparse_coo_tensor(indices.T, values, parameter.shape).coalesce()
    return summed if factor == 1.0 else summed.mul_(factor)


def _gathered(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The ``rows`` of all ranks, one after the other; ``sizes`` are their numbers."""
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    if padded.numel():
        collectives.all_gather(parts, padded, group=group, doing=_SUMS).wait()
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def is_sparse(gradient: Tensor | None) -> bool:
    """Whether ``gradient`` is sparse."""
    return gradient is not None and gradient.layout == torch.sparse_coo
