"""What must be the same on all ranks before the first step, and is made or checked to be."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp_strategy.errors import SMPError
from smp_strategy.partitioner.partition import Partition

__all__ = ["agree_on", "start_alike"]


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


def agree_on(partition: Partition, used_by_glue: Sequence[str]) -> tuple[Partition, list[str]]:
    """One decision for all ranks; collective.

    Replicas read different batches. Their shapes, and values where a step depends on them, lead to different costs and
    paths, so the ranks take over the partition of rank 0, and hold what code above the units uses on any of them.

    Args:
        partition: what this rank would do.
        used_by_glue: names of tensors of units that the code above them uses here.

    Raises:
        SMPError: the modules of the ranks have different units.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (partition, list(used_by_glue)))
    units = [sorted(theirs.stage_of) for theirs, _ in found]
    differing = [rank for rank, names in enumerate(units) if names != units[0]]
    if differing:
        name = min(set(units[0]) ^ set(units[differing[0]]))
        raise SMPError(
            f"Ranks {differing} have other units than rank 0: `{name}`, for example, is not on all of them. Build the "
            "same model on every rank."
        )
    return found[0][0], sorted({name for _, names in found for name in names})
