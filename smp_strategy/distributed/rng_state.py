"""States of random generators, of a process and of its device: in memory, in files, and across ranks.

A resumed run must draw what the original run would have drawn. The generators of a process are torch's of the host,
Python's, numpy's and that of the device the rank computes on. In memory a state is a tuple that compares fast, since
the data path compares it twice per batch. In a file it is a dict of tensors and numbers, which loads without unpickling
code.

Ranks that read the same samples draw alike, so a file has one state for each of these groups, and one for each rank
whose state differs nevertheless (the main process has drawn to show a sample). A run with the same layout resumes from
all of them, one with another layout from those of the groups.
"""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from smp_strategy.distributed.device import generator_of, is_host

__all__ = [
    "RngState",
    "are_equal",
    "drawing_from",
    "exceptions_to_first",
    "global_state",
    "of_rank",
    "packed",
    "set_global_state",
    "set_of_rank",
    "unpacked",
]

RngState = tuple[bytes, Any, Any]


def global_state() -> RngState:
    """State of torch's generator of the host, Python's, and numpy's if it has been imported."""
    numpy = sys.modules.get("numpy")  # code that draws from it has imported it
    state = numpy.random.get_state(legacy=True) if numpy is not None else None
    if state is not None:
        state = (state[0], state[1].tobytes(), *state[2:])
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), state


def set_global_state(state: RngState) -> None:
    """Restore a result of :func:`global_state`."""
    for_torch, for_python, for_numpy = state
    torch.set_rng_state(_tensor(for_torch))
    random.setstate(for_python)
    if for_numpy is not None:
        import numpy

        key = numpy.frombuffer(for_numpy[1], dtype=numpy.uint32)
        numpy.random.set_state((for_numpy[0], key, *for_numpy[2:]))


@contextmanager
def drawing_from(state: RngState) -> Iterator[None]:
    """Context that draws from ``state`` on; the generators are restored afterwards."""
    before = global_state()
    set_global_state(state)
    try:
        yield
    finally:
        set_global_state(before)


def packed(state: RngState) -> dict[str, Any]:
    """Pack ``state`` for a file: tensors, numbers and strings only."""
    for_torch, (version, words, gauss), for_numpy = state
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
    """Inverse of :func:`packed`."""
    python, numpy = state["python"], state.get("numpy")
    for_numpy = None
    if numpy is not None:
        key = numpy["key"].numpy().tobytes()
        for_numpy = (numpy["kind"], key, numpy["position"], numpy["has_gauss"], numpy["cached"])
    for_python = (python["version"], tuple(python["words"].tolist()), python["gauss"])
    return state["torch"].numpy().tobytes(), for_python, for_numpy


def of_rank(device: torch.device) -> dict[str, Any]:
    """States of the global generators of this process and of its device, for a file."""
    found = packed(global_state())
    if not is_host(device):
        found["device"] = {device.type: generator_of(device).get_state()}
    return found


def set_of_rank(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a result of :func:`of_rank`; a device of another kind keeps its generator's state."""
    set_global_state(unpacked(state))
    kept = state.get("device", {}).get(device.type)
    if kept is not None:
        generator_of(device).set_state(kept)


def exceptions_to_first(states: Sequence[Any], groups: Sequence[Sequence[int]]) -> dict[int, Any]:
    """States of ranks that differ from that of the first rank of their group.

    Args:
        states: States of all ranks.
        groups: Groups of ranks that draw alike.
    """
    return {
        rank: states[rank] for ranks in groups for rank in ranks[1:] if not are_equal(states[rank], states[ranks[0]])
    }


def are_equal(one: Any, other: Any) -> bool:
    """Whether two nested states, possibly with tensors and numpy arrays, are equal."""
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
