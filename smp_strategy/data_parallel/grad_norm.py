"""Global gradient norm of a model that is distributed over ranks, bit-identical to that of a single process.

A single process takes the norm of the vector of the parameters' gradient norms. Every rank fills in the entries that it
counts (its stage is the first that holds the parameter, its replica the one that updates it), the vector is summed over
the ranks, and every rank takes its norm: the same numbers in the same order as in a single process.

For a gradient that is sharded over a shard group each rank takes the norm of its piece. The norm over the ranks of
these is that of the gradient, except for rounding. The same holds for gradients of split layers, over the ranks that
have the parts; of parameters that are equal on these ranks the norm of the first rank counts, once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.data_parallel.sharded_gradient import ShardedGradient
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.precision.dtypes import gradient_dtype

__all__ = ["SplitParameters", "global_norm"]

_NORM = "the norm of gradients"


class SplitParameters(Protocol):
    """Parameters that a tensor-parallel group splits, and a collective of its ranks."""

    def has(self, parameter: object) -> bool:
        """Whether ``parameter`` is split."""

    def of_ranks(self, tensor: Tensor) -> Tensor:
        """Stack the ranks' ``tensor``, of the same shape on all. Collective."""


def global_norm(
    parameters: Sequence[nn.Parameter],
    counts_here: Callable[[nn.Parameter], bool],
    groups: Sequence[dist.ProcessGroup],
    norm_type: float,
    *,
    pieces_on: dist.ProcessGroup | None = None,
    parts: SplitParameters | None = None,
) -> Tensor:
    """Norm over the gradients of ``parameters``, each counted on one rank.

    Args:
        parameters: Parameters, the same list on every rank; some have no gradient here.
        counts_here: Tells whether this rank contributes the gradient of a parameter.
        groups: Groups over which the contributing ranks are distributed: the stages of a replica, and perhaps the
            replicas of a stage.
        norm_type: Order of the norm; ``inf`` for the maximum.
        pieces_on: Group over which gradients are sharded that are :class:`ShardedGradient` here.
        parts: Parameters that a tensor-parallel group splits.
    """
    mine = [
        (index, parameter.grad)
        for index, parameter in enumerate(parameters)
        if parameter.grad is not None and counts_here(parameter)
    ]
    if not parameters:
        return torch.zeros(())
    # Norms of complex gradients are real.
    dtypes = (gradient_dtype(parameter).to_real() for parameter in parameters)
    dtype = functools.reduce(torch.promote_types, dtypes)
    norms = torch.zeros(2, len(parameters), dtype=dtype, device=parameters[0].device)
    pieces: list[int] = []
    for index, gradient in mine:
        norms[1, index] = 1.0
        if isinstance(gradient, ShardedGradient):
            pieces.append(index)
            gradient = gradient.piece
        if gradient.numel():
            norms[0, index] = torch.linalg.vector_norm(gradient, norm_type)
    if pieces_on is not None and pieces:
        of_ranks = norms.new_empty(dist.get_world_size(pieces_on), len(parameters))
        collectives.all_gather(list(of_ranks.unbind()), norms[0], group=pieces_on, doing=_NORM).wait()
        norms[0, pieces] = torch.linalg.vector_norm(of_ranks[:, pieces], norm_type, dim=0)
    if parts is not None:
        split = [index for index, parameter in enumerate(parameters) if parts.has(parameter)]
        of_ranks = parts.of_ranks(norms[0])
        norms[0] = of_ranks[0]
        norms[0, split] = torch.linalg.vector_norm(of_ranks[:, split], norm_type, dim=0)
    for group in groups:
        collectives.reduce_numbers(norms, group=group, doing=_NORM).wait()
    found = norms[0, norms[1] > 0]
    return torch.linalg.vector_norm(found, norm_type) if len(found) else norms.new_zeros(())
