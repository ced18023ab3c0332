"""Synchronisation of the global random generators over the stages, so that they act as those of a single process.

A hook of the user seeds them, draws, and leaves the state from which the next epoch is shuffled. All stages run the
hook, so the states agree until a call draws on one stage only: a sample from a result of the model, a unit with
dropout. Then the other stages copy that stage's states before the program continues. A generator argument of the call
is treated likewise.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from smp_strategy.distributed.rng_state import RngState, capture, generators_of, restore

__all__ = ["GlobalGenerators"]

_OF_PYTHON = 625
_VERSION = 3
"""Version of the states of Python's generator since 3.2."""


@final
class GlobalGenerators:
    """Global generators of torch, Python and numpy, synchronised over the stages.

    Args:
        device: device whose generator is included, beside that of the host.
        send: broadcasts a tensor of the given stages to the others, which pass one of the same size; returns it there,
            and ``None`` on the sending stages.
    """

    def __init__(self, device: torch.device, send: Callable[[Tensor, Collection[int]], Tensor | None]) -> None:
        self._of_torch = generators_of(device)
        self._send = send

    def follow(self, stages: Collection[int], arguments: Iterable[Any]) -> None:
        """Copy the states of ``stages``, which may have drawn alike, to all other stages, with those of generators
        among the arguments; collective.
        """
        given = [argument for argument in arguments if isinstance(argument, torch.Generator)]
        generators = [*self._of_torch, *given]
        found = self._send(_states(generators), stages)
        if found is not None:
            _set_states(generators, found)


def _states(generators: Sequence[torch.Generator]) -> Tensor:
    """States of ``generators`` and of Python's and numpy's, as bytes; the same number of bytes on every stage."""
    of_torch, (_, words, gauss), (_, key, *rest) = capture(generators)
    others = [*words, math.nan if gauss is None else gauss, *rest, *np.frombuffer(key, dtype=np.uint32).tolist()]
    # Doubles hold words of 32 bits exactly.
    as_bytes = torch.tensor(others, dtype=torch.float64, device="cpu").view(torch.uint8)
    return torch.cat([torch.frombuffer(bytearray(b"".join(of_torch)), dtype=torch.uint8), as_bytes])


def _set_states(generators: Sequence[torch.Generator], states: Tensor) -> None:
    sizes = [generator.get_state().numel() for generator in generators]
    *of_torch, rest = states.split([*sizes, states.numel() - sum(sizes)])
    numbers = rest.clone().view(torch.float64).tolist()
    words, [gauss, position, has_gauss, cached, *key] = numbers[:_OF_PYTHON], numbers[_OF_PYTHON:]
    of_python = (_VERSION, tuple(map(int, words)), None if math.isnan(gauss) else gauss)
    of_numpy = ("MT19937", np.array(key, dtype=np.uint32).tobytes(), int(position), int(has_gauss), cached)
    restore(RngState(tuple(each.numpy().tobytes() for each in of_torch), of_python, of_numpy), generators)
