"""Gradient sums over the ranks of a group, after backward.

A parameter may have a gradient on one rank and none on another (it was unused in this step there). The ranks agree
first on which gradients exist anywhere; a gradient that no rank has stays ``None``, as in a single process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.config.options import DDPReduction
from smp_strategy.data_parallel.bucketed_all_reduce import Bucket, BucketedAllReduce
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.buckets import buckets
from smp_strategy.distributed.collectives.fusion_buffers import FUSION_BYTES, FusionBuffers
from smp_strategy.distributed.collectives.interface import JoinedSums, collectives_of, is_gloo
from smp_strategy.distributed.collectives.shared_memory_sums import SharedMemorySums
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.distributed.shared_arena import open_arenas
from smp_strategy.errors import ConfigError

__all__ = ["alike", "sum_gradients", "is_sparse", "may_be_sparse", "sum_sparse", "ReplicaSums", "replica_sums"]


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


# --- sparse gradients ------------------------------------------------------------------------------------------------
# Sums of sparse gradients over the ranks of a group.
#
# `nn.Embedding(sparse=True)` has a gradient of the rows that a batch has used, and optimizers such as SparseAdam update
# these rows only. So the sum over ranks must be sparse as well: it has the rows that any rank has used. Each rank
# gathers the rows of all others, and adds them in the order of the ranks.


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
    return gradient is not None and gradient.layout == torch.sparse_coo


# --- dense gradients of replicas -------------------------------------------------------------------------------------
# Choice of the way in which replicas sum dense gradients, by the places of the ranks.
#
# On one node the sums are in shared memory, between nodes they are hierarchical. Backends other than gloo know their
# links, and all-reduce themselves.


_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class ReplicaSums:
    """Sums over the replicas that the backend does not make.

    Attributes:
        way: How they are made, in words that continue "are summed".
        begin: Returns what sums the gradients of one step.
        bucket_bytes: Most bytes of gradients that are added at once; ``None``: as many as in an all-reduce.
        close: Ends background threads.
    """

    way: str
    begin: Callable[[], JoinedSums]
    bucket_bytes: int | None
    close: Callable[[], None]


def replica_sums(mesh: ProcessMesh, device: torch.device, wanted: DDPReduction) -> ReplicaSums | None:
    """Way to sum the gradients of replicas; ``None``: all-reduces of the backend. Collective over the replicas.

    Shard groups sum their gradients themselves.

    Args:
        mesh: Places of the replicas.
        device: Device of the gradients.
        wanted: Option ``ddp_reduction``.

    Raises:
        ConfigError: hierarchical sums are asked for, and the backend is not gloo.
    """
    if wanted == "flat" or mesh.dp == 1 or mesh.shard_group is not None:
        return None
    if wanted == "auto" and mesh.shape.are_on_one_node(mesh.rank, *_AXES):
        return _in_shared_memory(mesh, device)
    per_node = mesh.shape.ranks_per_node(mesh.rank, *_AXES)
    # Asked last: a group that is not needed would be made.
    if per_node is None:
        return None
    if is_gloo(mesh.sum_group, device):
        across_nodes = collectives_of(mesh.sum_group, device, per_node)
        # A fusion buffer takes the gradients of a bucket when all of them are complete, so buckets are small.
        return ReplicaSums(
            "inside each node first, then between nodes",
            lambda: FusionBuffers(across_nodes),
            FUSION_BYTES // 4,
            across_nodes.close,
        )
    if wanted == "hierarchical":
        raise ConfigError(
            f"`ddp_reduction=hierarchical` is for gloo, but gradients on {device} are summed by another backend, which "
            "knows its links. Leave the option out."
        )
    return None


def _in_shared_memory(mesh: ProcessMesh, device: torch.device) -> ReplicaSums | None:
    if not is_host(device) or not is_gloo(mesh.sum_group, device):
        return None
    own, theirs, failures = open_arenas(mesh.sum_group)
    if own is None or failures:
        return None
    sums = SharedMemorySums(mesh.sum_group, own, theirs)
    return ReplicaSums("in shared memory", lambda: sums, None, sums.close)
