"""Random generators: capture, restore and temporary use of their states; in memory, in files, and across ranks.

The generators of a process are torch's of the host, that of the device the rank computes on, Python's and numpy's; the
user may bring more of torch's. In memory a state is a tuple that compares fast, since the data path compares it twice
per batch. In a file it is a dict of tensors and numbers, which loads without unpickling code.

Ranks that read the same samples draw alike, so a file has one state for each of these groups, and one more for each
rank that differs (the main process has drawn to show a sample). A run with the same layout restores all of them, a run
with another layout those of the groups.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smp_strategy.distributed.device import generator_of, is_host

__all__ = [
    "RngState",
    "are_equal",
    "capture",
    "drawing_from",
    "exceptions_to_first",
    "generators_of",
    "global_state",
    "of_rank",
    "packed",
    "replay_from_now",
    "restore",
    "set_global_state",
    "set_of_rank",
    "unpacked",
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


def packed(state: RngState) -> dict[str, Any]:
    """``state`` for a file: tensors, numbers and strings only."""
    (for_torch,), (version, words, gauss), for_numpy = state
    found: dict[str, Any] = {
        "torch": _tensor(for_torch),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    if for_numpy is not None:
        kind, key, position, has_gauss, cached = for_numpy
        numbers = {"position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)}
        found["numpy"] = {"kind": str(kind), "key": _tensor(key), **numbers}
    return found


def unpacked(state: Mapping[str, Any]) -> RngState:
    """The state that :func:`packed` was given."""
    python, numpy = state["python"], state.get("numpy")
    for_numpy = None
    if numpy is not None:
        key = numpy["key"].numpy().tobytes()
        for_numpy = (numpy["kind"], key, numpy["position"], numpy["has_gauss"], numpy["cached"])
    for_python = (python["version"], tuple(python["words"].tolist()), python["gauss"])
    return RngState((state["torch"].numpy().tobytes(),), for_python, for_numpy)


def of_rank(device: torch.device) -> dict[str, Any]:
    """The states of the global generators of this process and of its device, for a file."""
    found = packed(global_state())
    if not is_host(device):
        found["device"] = {device.type: generator_of(device).get_state()}
    return found


def set_of_rank(state: Mapping[str, Any], device: torch.device) -> None:
    """Continue from a state of :func:`of_rank`; the generator of another kind of device is left alone."""
    set_global_state(unpacked(state))
    kept = state.get("device", {}).get(device.type)
    if kept is not None:
        generator_of(device).set_state(kept)


def exceptions_to_first(states: Sequence[Any], groups: Sequence[Sequence[int]]) -> dict[int, Any]:
    """The states of ranks that differ from the first rank of their group.

    Args:
        states: States of all ranks.
        groups: Ranks that draw alike.
    """
    return {
        rank: states[rank] for ranks in groups for rank in ranks[1:] if not are_equal(states[rank], states[ranks[0]])
    }


def are_equal(one: Any, other: Any) -> bool:
    """Whether two nested states, which may contain tensors and numpy arrays, are the same."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if hasattr(one, "__array__"):
        return bool((one == other).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
