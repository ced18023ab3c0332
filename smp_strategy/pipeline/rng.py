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
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["RngState", "begin_at", "derive_seed", "kept", "seeded"]


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that is the same on every machine for the same ``parts``."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a stream that begins at ``seed``; the global streams go on afterwards as if nothing was drawn."""
    with kept(device):
        begin_at(seed, device)
        yield


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Whatever is drawn in here, the global streams go on afterwards as if nothing was drawn."""
    before = RngState.current(device)
    try:
        yield
    finally:
        before.restore()


def begin_at(seed: int, device: torch.device) -> None:
    """Draw from a stream that begins at ``seed`` from now on."""
    # Not `torch.manual_seed`: for each kind of accelerator that is not in use it notes the stack of its caller, which
    # takes 0.4 ms and is kept for ever.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class RngState:
    """The state of the random number generators that the glue may draw from: torch's, Python's and numpy's."""

    def __init__(
        self, torch_state: torch.Tensor, cuda_state: torch.Tensor | None, python_state: Any, numpy_state: Any
    ) -> None:
        self._torch = torch_state
        self._cuda = cuda_state
        self._python = python_state
        self._numpy = numpy_state

    @classmethod
    def current(cls, device: torch.device) -> "RngState":
        """Take a snapshot."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Continue the streams from this snapshot."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
