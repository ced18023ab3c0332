"""Device memory limit of a rank, if the user gives none.

A rank may use all memory of its accelerator, unless other ranks compute on the same one: they share it evenly. A
process numbers the accelerators that it sees, so numbers do not tell who shares. Accelerators have an identity (UUID);
for one without, the host name and its number are used. The ranks exchange these, and the limit of a stage is the lowest
of its ranks, so that all of them decide alike.
"""

import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh_shape import MeshShape

__all__ = ["DeviceMemory", "device_memory", "memory_of_stages", "shared"]


class DeviceMemory(NamedTuple):
    """Memory of an accelerator."""

    identity: str
    """Identity: equal for all ranks that compute on this accelerator, and for no others."""
    nbytes: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Memory of ``device``; ``None`` for CPUs, whose memory ranks share and may exceed."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    number = torch.cuda.current_device() if device.index is None else device.index
    identity = getattr(properties, "uuid", None) or f"{socket.gethostname()}, {number}"
    return DeviceMemory(str(identity), int(properties.total_memory))


def memory_of_stages(device: torch.device, shape: MeshShape) -> tuple[int | None, ...]:
    """Bytes that a rank of each stage may fill. Collective over all ranks."""
    return shared(collectives.gather_objects(device_memory(device), "the memory of all devices"), shape)


def shared(memories: Sequence[DeviceMemory | None], shape: MeshShape) -> tuple[int | None, ...]:
    """Bytes that a rank of each stage may fill if the ranks have accelerators with these ``memories``."""
    num_sharing = Counter(memory.identity for memory in memories if memory is not None)
    least: list[int | None] = [None] * shape.pp
    for rank, memory in enumerate(memories):
        if memory is not None:
            stage = shape.pp - 1 - shape.coordinates(rank)["pp"]
            mine = memory.nbytes // num_sharing[memory.identity]
            others = least[stage]
            least[stage] = mine if others is None else min(others, mine)
    return tuple(least)
