"""Choice of the way in which replicas sum dense gradients, by the places of the ranks.

On one node the sums are in shared memory, between nodes they are hierarchical. Backends other than gloo know their
links, and all-reduce themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from smp_strategy.config.options import DDPReduction
from smp_strategy.distributed.collectives.fusion_buffers import FUSION_BYTES, FusionBuffers
from smp_strategy.distributed.collectives.interface import JoinedSums, collectives_of, is_gloo
from smp_strategy.distributed.collectives.shared_memory_sums import SharedMemorySums
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.distributed.shared_arena import open_arenas
from smp_strategy.errors import ConfigError

__all__ = ["ReplicaSums", "replica_sums"]

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
