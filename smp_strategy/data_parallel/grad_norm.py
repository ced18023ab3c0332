"""Global gradient norm of a model that is distributed over ranks, bit-identical to that of a single process.

A single process takes the norm of the vector of the parameters' gradient norms. Every rank fills in the entries that it
counts (its stage is the first that holds the parameter, its replica the one that updates it), the vector is summed over
the ranks, and every rank takes its norm: the same numbers in the same order as in a single process.

For a gradient that is sharded over a shard group each rank takes the norm of its piece. The norm over the ranks of
these is that of the gradient, except for rounding. The same holds for gradients of split layers, over the ranks that
have the parts; of parameters that are equal on these ranks the norm of the first rank counts, once.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.data_parallel.parameter_pieces import ShardedGradient
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.torch_private import unscale_
from smp_strategy.model.parameter_parts import ParameterParts
from smp_strategy.precision.dtypes import gradient_dtype

__all__ = ["UnscaleResult", "agreed", "global_norm", "unscale_gradients"]


_NORM = "the norm of gradients"


class UnscaleResult(Enum):
    """Finding of all ranks together about the gradients of an optimizer."""

    NOTHING = "no gradient"
    FINITE = "finite gradients only"
    OVERFLOW = "a gradient that is infinite, or no number"

    @property
    def has_overflowed(self) -> bool:
        """Whether the step must be skipped."""
        return self is UnscaleResult.OVERFLOW


def global_norm(
    parameters: Sequence[nn.Parameter],
    counts_here: Callable[[nn.Parameter], bool],
    groups: Sequence[dist.ProcessGroup],
    norm_type: float,
    parts: ParameterParts,
    *,
    pieces_on: dist.ProcessGroup | None = None,
) -> Tensor:
    """Norm over the gradients of ``parameters``, each counted on one rank.

    Args:
        parameters: Parameters, the same list on every rank; some have no gradient here.
        counts_here: Tells whether this rank contributes the gradient of a parameter.
        groups: Groups over which the contributing ranks are distributed: the stages of a replica, and perhaps the
            replicas of a stage.
        norm_type: Order of the norm; ``inf`` for the maximum.
        parts: Parameters that a tensor-parallel group splits.
        pieces_on: Group over which gradients are sharded that are :class:`ShardedGradient` here.
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
    if parts.is_split:
        split = [index for index, parameter in enumerate(parameters) if parts.has(parameter)]
        of_ranks = parts.of_ranks(norms[0])
        norms[0] = of_ranks[0]
        norms[0, split] = torch.linalg.vector_norm(of_ranks[:, split], norm_type, dim=0)
    for group in groups:
        collectives.reduce_numbers(norms, group=group, doing=_NORM).wait()
    found = norms[0, norms[1] > 0]
    return torch.linalg.vector_norm(found, norm_type) if len(found) else norms.new_zeros(())


# --- unscaling -------------------------------------------------------------------------------------------------------
# Gradient unscaling by the loss scale, and agreement of all ranks on whether any gradient has overflowed.
#
# A rank has gradients of its stage, its part of split layers, its pieces of sharded parameters, or of the parameters
# that its replica updates; an overflow may show on a single rank only. Skipping a step is a decision of all of them, so
# there is one reduction of the outcome over all ranks.


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
