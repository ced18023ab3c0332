"""Random draws of one program: each random call has a stream of its own, or all draw from the global generators."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, final

from smp_strategy.model.rng import Streams, derive_seed
from smp_strategy.pipeline.global_rng import GlobalGenerators

__all__ = ["ProgramDraws"]

# No other seed derives from that of a program by this number.
_OPERATIONS = -2


@final
class ProgramDraws:
    """Seeds of the random calls of one program.

    Args:
        streams: random streams of the stage.
        seed: of the program.
        generators: the program draws from the global ones, as all stages do; ``None``: from streams of its own.
    """

    def __init__(self, streams: Streams, seed: int, generators: GlobalGenerators | None) -> None:
        self._streams = streams
        self._seed = seed
        self._generators = generators
        self._num_operations = 0

    def count_operation(self) -> None:
        """A random operation of the glue is called; all stages count it."""
        self._num_operations += 1

    def seeded(self, kind: Literal["unit", "op"], position: int) -> Callable[[], AbstractContextManager[None]] | None:
        """The stream of a random call, to be entered; ``None``: it draws from the global generators.

        Args:
            kind: of the call.
            position: of its event in the record.
        """
        if self._generators is not None:
            return None
        # Operations count for themselves: how many units there are goes by the layout.
        place = (_OPERATIONS, self._num_operations) if kind == "op" else (position,)
        return functools.partial(self._streams.seeded, derive_seed(self._seed, *place))

    def follow(self, stages: Sequence[int], leaves: list[Any]) -> None:
        """Bring the global generators of other stages to where those of ``stages`` are. Collective."""
        if self._generators is not None:
            self._generators.follow(stages, leaves)
