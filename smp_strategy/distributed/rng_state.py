"""Random generators: capture, restore and temporary use of their states.

The generators of a process are torch's of the host, that of the device the rank computes on, Python's and numpy's; the
user may bring more of torch's. A state is a tuple that compares fast, since the data path compares it twice per batch.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smp_strategy.distributed.device import generator_of, is_host

__all__ = [
    "RngState",
    "capture",
    "drawing_from",
    "generators_of",
    "global_state",
    "replay_from_now",
    "restore",
    "set_global_state",
]

Generators = Sequence[torch.Generator]


class RngState(NamedTuple):
    """State of some random generators."""

    torch: tuple[bytes, ...]
    """Of torch's, in the order in which they were given."""
    python: Any
    """Of Python's; ``None``: not captured."""
    numpy: Any
    """Of numpy's, with its key as bytes; ``None``: not captured."""


def generators_of(device: torch.device) -> list[torch.Generator]:
    """torch's generators of the host and of ``device``. Reading their states does not wait for the device."""
    of_host = torch.default_generator
    return [of_host] if is_host(device) else [of_host, generator_of(device)]


def capture(generators: Generators, *, python: bool = True, numpy: bool = True) -> RngState:
    """The states of torch's ``generators``, of Python's and of numpy's.

    Args:
        generators: torch's generators.
        python: Include Python's generator.
        numpy: Include numpy's generator, which takes ten times as long as the others together.
    """
    of_numpy: Any = None
    if numpy:
        kind, key, *rest = np.random.get_state(legacy=True)
        of_numpy = (kind, key.tobytes(), *rest)  # type: ignore[union-attr]
    of_torch = tuple(generator.get_state().numpy().tobytes() for generator in generators)
    return RngState(of_torch, random.getstate() if python else None, of_numpy)


def restore(state: RngState, generators: Generators) -> None:
    """Continue from ``state``, which :func:`capture` has taken of as many ``generators`` of torch."""
    for generator, of_torch in zip(generators, state.torch, strict=True):
        generator.set_state(_tensor(of_torch))
    if state.python is not None:
        random.setstate(state.python)
    if state.numpy is not None:
        kind, key, *rest = state.numpy
        np.random.set_state((kind, np.frombuffer(key, dtype=np.uint32), *rest))


def global_state() -> RngState:
    """The states of the global generators of the host: torch's, Python's and numpy's."""
    return capture([torch.default_generator])


def set_global_state(state: RngState) -> None:
    """Continue from a :func:`global_state`."""
    restore(state, [torch.default_generator])


@contextmanager
def drawing_from(state: RngState, generators: Generators | None = None) -> Iterator[None]:
    """Draw from ``state`` in here; afterwards the generators in it are where they were before.

    Args:
        state: State of ``generators``, with or without Python's and numpy's.
        generators: torch's generators; by default the one of the host.
    """
    used = [torch.default_generator] if generators is None else generators
    before = capture(used, python=state.python is not None, numpy=state.numpy is not None)
    restore(state, used)
    try:
        yield
    finally:
        restore(before, used)


def replay_from_now(device: torch.device, *, only_torch: bool = False) -> Callable[[], AbstractContextManager[None]]:
    """Capture the global generators; the result opens contexts that draw the same numbers again.

    Args:
        device: Its generator is captured as well.
        only_torch: Leave out Python's and numpy's generators, which take much longer.
    """
    generators = generators_of(device)
    return partial(drawing_from, capture(generators, python=not only_torch, numpy=not only_torch), generators)


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
