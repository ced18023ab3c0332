"""Random streams of one program: one per random call, or the global generators for all."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, final

from smp_strategy.model.rng import Streams, derive_seed
from smp_strategy.pipeline.isolation.global_rng import GlobalGenerators

__all__ = ["ProgramDraws"]

# No other seed derives from that of a program by this number.
_OPERATIONS = -2


@final
class ProgramDraws:
    """Seeds of the random calls of one program, or the global generators that it draws from, as all stages do."""

    def __init__(self, streams: Streams, seed: int, generators: GlobalGenerators | None) -> None:
        self._streams = streams
        self._seed = seed
        self._generators = generators
        self._num_operations = 0

    def count_operation(self) -> None:
        """Count a random operation of the glue; call it on all stages."""
        self._num_operations += 1

    def seeded(self, kind: Literal["unit", "op"], position: int) -> Callable[[], AbstractContextManager[None]] | None:
        """Context factory for the stream of a random call; ``None`` if it draws from the global generators."""
        if self._generators is not None:
            return None
        # Operations have a count of their own: the number of units depends on the partition, and draws must not.
        place = (_OPERATIONS, self._num_operations) if kind == "op" else (position,)
        return functools.partial(self._streams.seeded, derive_seed(self._seed, *place))

    def follow(self, stages: Sequence[int], leaves: list[Any]) -> None:
        """Synchronise the global generators of other stages with those of ``stages``; collective."""
        if self._generators is not None:
            self._generators.follow(stages, leaves)
