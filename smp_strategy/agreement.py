"""What must be the same on all ranks before the first step, and is made or checked to be."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp_strategy.errors import SMPError
from smp_strategy.partition.partition import Partition

__all__ = ["check_same_partition", "start_alike"]


def start_alike(module: nn.Module) -> int:
    """Give every rank the parameters and buffers of rank 0; collective.

    Returns:
        A seed that is the same on every rank: that of rank 0's generator.
    """
    seed = torch.tensor([torch.initial_seed() >> 1], dtype=torch.int64)
    dist.broadcast(seed, 0)
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    with torch.no_grad():
        for tensor in tensors.values():
            dist.broadcast(tensor.detach(), 0)
    return int(seed)


def check_same_partition(partition: Partition) -> None:
    """Compare the decisions of all ranks; collective.

    Raises:
        SMPError: they differ.
    """
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, partition.digest)
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise SMPError(
            f"Ranks {differing} decided on another partition than rank 0: their models or first batches differ. "
            "Build the same model and read the same data on every rank of a replica."
        )
