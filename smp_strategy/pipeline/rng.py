"""Random numbers that do not depend on the layout.

Ranks run different parts of a program in different orders, so drawing from one global stream would give every
layout its own dropout masks, and code of the glue would draw different numbers on different ranks. Instead each
microbatch has its own stream, and each call that draws random numbers (a unit with dropout, say) has a seed of its
own, both derived from the step's seed by hashing. The same step seed gives the same numbers on any number of stages
and under any schedule.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import numpy as np
import torch

from smp_strategy.accelerator import generator_of, is_host

__all__ = ["Stream", "Streams", "begin_at", "derive_seed", "seeded"]


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that is the same on every machine for the same ``parts``."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def begin_at(seed: int, device: torch.device) -> None:
    """Draw from a stream that begins at ``seed`` from now on."""
    # Not `torch.manual_seed`: for each kind of accelerator that is not in use it notes the stack of its caller, which
    # takes 0.4 ms and is kept for ever.
    for generator in _generators(device):
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@final
class Streams:
    """Makes streams that programs draw from in turn, each through the global functions.

    Getting or setting the state of numpy's generator takes ten times as long as those of torch and Python together, so
    each stream has a generator of numpy's of its own, which is put into the place of the global one; and because
    making one takes as long again, they are used again.

    Args:
        device: whose generator belongs to a stream, beside torch's, Python's and numpy's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spare: list[Any] = []

    def stream(self, seed: int) -> "Stream":
        """A stream that begins at ``seed``."""
        return Stream(seed, self.device, self._spare)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Draw from a stream that begins at ``seed``; the global ones go on afterwards as if nothing was drawn."""
        stream, states = self.stream(seed), _states(self.device)
        stream.enter()
        try:
            yield
        finally:
            stream.leave(for_good=True)
            _set_states(states)


@final
class Stream:
    """Random numbers of one program; see :class:`Streams`."""

    def __init__(self, seed: int, device: torch.device, spare: list[Any]) -> None:
        self._seed = seed
        self._device = device
        self._spare = spare
        self._states: _States | None = None
        self._own: Any = None
        self._others: Any = None

    def enter(self) -> None:
        """From now on numbers are drawn from here."""
        if self._own is None:
            self._own = self._spare.pop() if self._spare else np.random.MT19937()
        self._others = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.set_bit_generator(self._own)  # type: ignore[attr-defined]
        if self._states is None:
            begin_at(self._seed, self._device)
        else:
            _set_states(self._states)

    def leave(self, *, for_good: bool = False) -> None:
        """Something else follows, which begins a stream of its own.

        Args:
            for_good: nothing will be drawn from here any more.
        """
        np.random.set_bit_generator(self._others)  # type: ignore[attr-defined]
        if for_good:
            self._spare.append(self._own)
            self._own = self._states = None
        else:
            self._states = _states(self._device)


def seeded(seed: int, device: torch.device) -> AbstractContextManager[None]:
    """:meth:`Streams.seeded` for once."""
    return Streams(device).seeded(seed)


_States = tuple[torch.device, list[torch.Tensor], Any]


def _generators(device: torch.device) -> list[torch.Generator]:
    """torch's, of the host and of the device. Their states are on the host: none of this waits for the device."""
    of_host = torch.default_generator
    return [of_host] if is_host(device) else [of_host, generator_of(device)]


def _states(device: torch.device) -> _States:
    """Of the generators but numpy's."""
    return device, [generator.get_state() for generator in _generators(device)], random.getstate()


def _set_states(states: _States) -> None:
    device, of_torch, of_python = states
    for generator, state in zip(_generators(device), of_torch, strict=True):
        generator.set_state(state)
    random.setstate(of_python)
