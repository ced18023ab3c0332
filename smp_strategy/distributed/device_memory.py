"""How many bytes may a rank fill, where the user does not say?

All of its accelerator, unless other ranks compute on the same one: they share its memory evenly. A process numbers the
accelerators that it sees, so numbers tell nobody who shares; accelerators have an identity of their own, and where one
has none it is the number on that machine. The ranks tell each other, and a stage has what the poorest of its ranks has,
so that all of them decide alike.
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
    """The memory of an accelerator."""

    identity: str
    """The same for all who compute on it, and for nobody else."""
    nbytes: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """What ``device`` has; ``None`` for CPUs, whose memory ranks share and may exceed."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    number = torch.cuda.current_device() if device.index is None else device.index
    identity = getattr(properties, "uuid", None) or f"{socket.gethostname()}, {number}"
    return DeviceMemory(str(identity), int(properties.total_memory))


def memory_of_stages(device: torch.device, shape: MeshShape) -> tuple[int | None, ...]:
    """Bytes that a rank of each stage may fill. Collective over all ranks.

    Args:
        device: where this rank computes.
        shape: which rank is which stage.
    """
    return shared(collectives.gather_objects(device_memory(device), "the memory of all devices"), shape)


def shared(memories: Sequence[DeviceMemory | None], shape: MeshShape) -> tuple[int | None, ...]:
    """Bytes that a rank of each stage may fill, where ranks compute on accelerators with these ``memories``."""
    num_sharing = Counter(memory.identity for memory in memories if memory is not None)
    least: list[int | None] = [None] * shape.pp
    for rank, memory in enumerate(memories):
        if memory is not None:
            stage = shape.pp - 1 - shape.coordinates(rank)["pp"]
            mine = memory.nbytes // num_sharing[memory.identity]
            others = least[stage]
            least[stage] = mine if others is None else min(others, mine)
    return tuple(least)
