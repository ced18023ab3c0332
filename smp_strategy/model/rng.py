"""Layout-independent random streams, seeded by hashing.

Ranks run different parts of a program in different orders, so one global stream would give every layout its own
dropout masks, and glue code would draw different numbers on different ranks. Instead each microbatch has its own
stream, and each call that draws random numbers (a unit with dropout, say) its own seed, both hashed from the step's
seed. The same step seed gives the same numbers on any number of stages and under any schedule.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, final

import numpy as np
import torch

from smp_strategy.distributed.rng_state import RngState, capture, drawing_from, generators_of, restore

__all__ = ["Stream", "Streams", "begin_at", "derive_seed", "seeded"]


def derive_seed(*parts: int) -> int:
    """A 63-bit seed, hashed from ``parts``; the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@final
class Streams:
    """Factory of random streams that programs use in turn, each through the global functions.

    Getting or setting the state of numpy's generator takes ten times as long as those of torch and Python together. So
    each stream has a numpy generator of its own, which replaces the global one; making one is as slow, so they are
    reused.

    Attributes:
        device: As given.
        spare: numpy generators that no stream uses.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spare: list[Any] = []

    @cached_property
    def generators(self) -> list[torch.Generator]:
        """torch's generators of the host and of the device."""
        return generators_of(self.device)

    def stream(self, seed: int) -> "Stream":
        """A stream that begins at ``seed``."""
        return Stream(seed, self)

    def begin_at(self, seed: int) -> None:
        """Draw from a stream that begins at ``seed`` from now on."""
        self.begin_states_at(seed)
        np.random.seed(seed % 2**32)

    def begin_states_at(self, seed: int) -> None:
        """Like :meth:`begin_at`, but without numpy's global generator, which no stream has drawn from."""
        # Not `torch.manual_seed`: for each kind of accelerator that is not in use it notes the stack of its caller,
        # which takes 0.4 ms and is kept for ever.
        for generator in self.generators:
            generator.manual_seed(seed)
        random.seed(seed)

    def state(self) -> RngState:
        """State of all generators but numpy's."""
        return capture(self.generators, numpy=False)

    def restore(self, state: RngState) -> None:
        restore(state, self.generators)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Draw from a stream that begins at ``seed``; afterwards the global generators are as before."""
        stream = self.stream(seed)
        with drawing_from(self.state(), self.generators):
            stream.enter()
            try:
                yield
            finally:
                stream.leave(for_good=True)


@final
class Stream:
    """Random stream of one program, made by :class:`Streams`."""

    def __init__(self, seed: int, streams: Streams) -> None:
        self._seed = seed
        self._streams = streams
        self._state: RngState | None = None
        self._own: Any = None
        self._others: Any = None

    def enter(self) -> None:
        """Make this the stream that the global functions draw from."""
        if self._own is None:
            self._own = self._streams.spare.pop() if self._streams.spare else np.random.MT19937()
        self._others = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.set_bit_generator(self._own)  # type: ignore[attr-defined]
        if self._state is None:
            self._streams.begin_at(self._seed)
        else:
            self._streams.restore(self._state)

    def leave(self, *, for_good: bool = False) -> None:
        """Pause the stream. The caller enters another one, or restores the generators.

        Args:
            for_good: The stream ends; its numpy generator is reused.
        """
        np.random.set_bit_generator(self._others)  # type: ignore[attr-defined]
        if for_good:
            self._streams.spare.append(self._own)
            self._own = self._state = None
        else:
            self._state = self._streams.state()


def seeded(seed: int, device: torch.device) -> AbstractContextManager[None]:
    """:meth:`Streams.seeded` for a single use."""
    return Streams(device).seeded(seed)


def begin_at(seed: int, device: torch.device) -> None:
    """:meth:`Streams.begin_at` for a single use."""
    Streams(device).begin_at(seed)
