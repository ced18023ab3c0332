"""The global random generators of all stages, as those of one process.

A hook of the user seeds them, draws, and leaves them where the next epoch is shuffled from. All stages run the hook, so
they stand alike, until something draws on one stage only: a sample from what the model has returned, a unit with
dropout. Then the other stages set theirs to where that stage's stand, before the program goes on. A generator that the
user gives to the operation is treated likewise.
"""

import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from smp_strategy.model.rng import Streams

__all__ = ["GlobalGenerators"]

_OF_PYTHON = 625
_VERSION = 3
"""Of the states of Python's generator since 3.2."""


@final
class GlobalGenerators:
    """See the module docstring. Beside torch's there are Python's and numpy's, which units may draw from.

    Args:
        device: whose generator is drawn from, beside that of the host.
        send: gives the tensor of given stages to the others, which have one as large; returns it there.
    """

    def __init__(self, device: torch.device, send: Callable[[Tensor, Collection[int]], Tensor | None]) -> None:
        self._of_torch = Streams(device).generators
        self._send = send

    def follow(self, stages: Collection[int], arguments: Iterable[Any]) -> None:
        """Something may have drawn on ``stages``: the others go on from there, too. Collective over all stages.

        Args:
            stages: where that was, the same on each.
            arguments: what it was given; there may be generators among them.
        """
        given = [argument for argument in arguments if isinstance(argument, torch.Generator)]
        generators = [*self._of_torch, *given]
        found = self._send(_states(generators), stages)
        if found is not None:
            _set_states(generators, found)


def _states(generators: Sequence[torch.Generator]) -> Tensor:
    """Of ``generators``, of Python's and of numpy's, as bytes."""
    _, words, gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=True)
    _, key, *rest = of_numpy
    others = [*words, math.nan if gauss is None else gauss, *rest, *key.tolist()]
    # Doubles hold words of 32 bits exactly.
    as_bytes = torch.tensor(others, dtype=torch.float64, device="cpu").view(torch.uint8)
    return torch.cat([*[generator.get_state() for generator in generators], as_bytes])


def _set_states(generators: Sequence[torch.Generator], states: Tensor) -> None:
    for generator in generators:
        size = generator.get_state().numel()
        generator.set_state(states[:size].clone())
        states = states[size:]
    numbers = states.clone().view(torch.float64).tolist()
    words, [gauss, position, has_gauss, cached, *key] = numbers[:_OF_PYTHON], numbers[_OF_PYTHON:]
    random.setstate((_VERSION, tuple(map(int, words)), None if math.isnan(gauss) else gauss))
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), int(position), int(has_gauss), cached))
