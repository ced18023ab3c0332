"""Rank group: values that ranks exchange outside of steps, in calls of users or of a framework.

Each wait is watched, and an error names the call (:mod:`smp_strategy.distributed.watched_collectives`). Between ranks
that read different samples: :mod:`smp_strategy.engine.data_ranks`.
"""

from collections.abc import Mapping
from typing import Any, Self, final

import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.distributed.process_groups import new_subgroup
from smp_strategy.distributed.torch_private import default_group

__all__ = ["RankGroup"]


@final
class RankGroup:
    """Ranks of a process group. Methods are collective over them, but for messages between two ranks.

    Args:
        group: their process group; ``None``: all ranks.
        members: their global ranks, ascending.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, members: tuple[int, ...] = ()) -> None:
        self.group, self.members = group or default_group(), members

    @classmethod
    def along(cls, shape: MeshShape, kinds: Mapping[str, tuple[str, ...]]) -> dict[str, Self]:
        """Groups of this rank along the axes of each kind, one for each set of ranks. Collective over all ranks."""
        found: dict[str, Self] = {}
        known: dict[tuple[tuple[int, ...], ...], Self] = {}
        for kind, axes in kinds.items():
            key = tuple(tuple(sorted(each)) for each in shape.groups(*axes))
            if key not in known:
                group = new_subgroup([list(each) for each in key])
                assert group is not None
                known[key] = cls(group, next(each for each in key if dist.get_rank() in each))
            found[kind] = known[key]
        return found

    def wait(self, call: str) -> None:
        """Wait for all ranks."""
        collectives.barrier(call, self.group)

    def tell(self, value: Any, source: int, call: str) -> Any:
        """Send an object from the global rank ``source`` to all."""
        return collectives.tell(value, source, call, self.group)

    def gather(self, value: Any, call: str) -> list[Any]:
        """Objects of all ranks, in their order."""
        return collectives.gather_objects(value, call, self.group)

    def agree(self, decision: bool, call: str, *, all: bool) -> bool:
        """Whether all ranks, or any of them, have decided so."""
        votes = collectives.gather_numbers(int(decision), call, self.group)
        return min(votes) == 1 if all else max(votes) == 1

    def reduce(self, tensor: Tensor, how: str, call: str) -> Tensor:
        """Reduce ``tensor`` in place: ``mean``, ``sum``, ``max`` and so on."""
        self.wait(call)
        op = getattr(dist.ReduceOp, "SUM" if how in ("mean", "avg", "none") else how.upper())
        collectives.all_reduce(tensor, op, group=self.group, doing=call).wait()
        return tensor.copy_(tensor / dist.get_world_size(self.group)) if how in ("mean", "avg") else tensor

    @staticmethod
    def send(value: Any, target: int, call: str) -> None:
        """Send an object to the global rank ``target``, which calls :meth:`receive`."""
        collectives.send_object(value, target, call)

    @staticmethod
    def receive(source: int, call: str) -> Any:
        """Receive an object from the global rank ``source``."""
        return collectives.receive_object(source, call)
