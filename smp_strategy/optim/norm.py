"""The true global gradient norm of a model whose gradients are spread over ranks.

One process takes the norm of the vector of the parameters' gradient norms. Every rank fills in the entries of the
gradients that it counts (its stage is the first that holds the parameter, its replica the one that updates it), the
vector is added up over the ranks, and every rank takes its norm: the same numbers in the same order as in one process,
so the result is bit-identical.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["global_norm"]


def global_norm(
    parameters: Sequence[nn.Parameter],
    counts_here: Callable[[nn.Parameter], bool],
    groups: Sequence[dist.ProcessGroup],
    norm_type: float,
) -> Tensor:
    """Norm over the gradients of ``parameters``, each counted on one rank.

    Args:
        parameters: the same list, in the same order, on every rank; some have no gradient here.
        counts_here: whether this rank contributes the gradient of a parameter.
        groups: over which the ranks that do are spread: the stages of a replica, and perhaps the replicas of a stage.
        norm_type: order of the norm; ``inf`` for the maximum.
    """
    mine = [
        (index, parameter.grad)
        for index, parameter in enumerate(parameters)
        if parameter.grad is not None and counts_here(parameter)
    ]
    if not parameters:
        return torch.zeros(())
    dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in parameters))
    norms = torch.zeros(2, len(parameters), dtype=dtype, device=parameters[0].device)
    for index, gradient in mine:
        norms[0, index] = torch.linalg.vector_norm(gradient, norm_type)
        norms[1, index] = 1.0
    for group in groups:
        dist.all_reduce(norms, group=group)
    found = norms[0, norms[1] > 0]
    return torch.linalg.vector_norm(found, norm_type) if len(found) else norms.new_zeros(())
