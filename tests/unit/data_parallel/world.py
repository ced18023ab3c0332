"""A shard group in one process: every rank has its own collectives, and all ranks take turns by hand."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.distributed.collectives.direct import add_up
from smp_strategy.distributed.handle import Handle


@final
class World:
    """What the ranks have started, in their order."""

    def __init__(self, size: int) -> None:
        self.members = [Member(self, rank) for rank in range(size)]


@final
class Member:
    """The collectives of one rank, which can wait when all others have started."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self._world = rank, world
        self.started: list[Any] = []

    @property
    def size(self) -> int:
        return len(self._world.members)

    def gather(self, full: Tensor, shard: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        number = len(self.started)
        self.started.append(shard.clone())
        return Handle(lambda: full.copy_(torch.cat([member.started[number] for member in self._world.members])))

    def reduce(
        self, full: Tensor, into: Tensor, after: Sequence[Handle[object]] = (), *, is_first: bool, factor: float = 1
    ) -> Handle[object]:
        number = len(self.started)
        self.started.append(full.clone())
        return Handle(
            lambda: add_up(
                into,
                [member.started[number].chunk(self.size)[self.rank] for member in self._world.members],
                is_first=is_first,
                factor=factor,
            )
        )

    def all_reduce(self, tensor: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to let go of."""
