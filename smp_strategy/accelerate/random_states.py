"""Where the global random generators of all ranks are, in Accelerate's own files.

Accelerate writes a file for each process. Here it is one for each rank that reads samples of its own, so that a plain
run with that many processes goes on with them, and the other way round. The ranks of a pipeline draw alike, so that one
file serves them all; where they do not (the main process has drawn for itself), each has its own again if a run goes on
with the same layout.

In these files stands also how far gradient accumulation has come. That must be the same on all ranks, also on those for
which there is no file.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import load

from smp_strategy.accelerate.session import Session

__all__ = ["FILE", "gathered", "set_states", "step_in"]

# As Accelerate calls them (`RNG_STATE_NAME` and what it adds).
FILE: Final = "random_states_{}.pkl"


def gathered(session: Session, step: int) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """The states of all ranks; collective.

    Args:
        session: says which ranks read alike.
        step: how many calls of ``accumulate`` there were, as Accelerate counts.

    Returns:
        For each data rank those of its first rank, as they go into its file; and for each other rank that has other
        ones, its own.
    """
    states: list[Any] = [None] * session.shape.world_size
    dist.all_gather_object(states, _states(step))
    firsts = [ranks[0] for ranks in session.data_ranks()]
    others = {
        rank: states[rank]
        for ranks in session.data_ranks()
        for rank in ranks[1:]
        if not _are_equal(states[rank], states[ranks[0]])
    }
    return [states[rank] for rank in firsts], others


def step_in(folder: Path) -> int | None:
    """How far gradient accumulation had come when ``folder`` was written; ``None``: that is not in there."""
    path = folder / FILE.format(0)
    step: int | None = load(path).get("step") if path.exists() else None
    return step


def set_states(states: Mapping[str, Any]) -> None:
    """Let the generators of this rank go on from there."""
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    for kind in _accelerators():
        if (key := f"torch_{kind}_manual_seed") in states:
            torch.get_device_module(kind).set_rng_state_all(states[key])


def _states(step: int) -> dict[str, Any]:
    """As in Accelerate's file."""
    return {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
        **{f"torch_{kind}_manual_seed": torch.get_device_module(kind).get_rng_state_all() for kind in _accelerators()},
    }


def _accelerators() -> list[str]:
    device = torch.accelerator.current_accelerator(check_available=True)
    return [] if device is None or device.type == "mps" else [device.type]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)
