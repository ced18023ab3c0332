"""Global RNG states of all ranks, in Accelerate's own checkpoint files.

Accelerate writes a file for each process. Here each data rank has one, so a plain run with that many processes can
resume from them, and the other way round. The ranks of a pipeline draw alike, so one file serves them all. Ranks that
draw differently (the main process has drawn for itself) get their own states back if the layout is the same.

Generators of data loaders, which Accelerate leaves out, go into our own file: without them later passes would shuffle
differently. (A pass that has begun is repeated up to its position only with ``use_seedable_sampler=True``, which begins
each pass with a seed.)

Accelerate's files also hold the progress of gradient accumulation. It must be the same on all ranks, including those
without a file.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from accelerate.utils import load

from smp_strategy.engine.saving.rank_generators import of_groups
from smp_strategy.integrations.accelerate.session import Session

__all__ = ["FILE", "gathered", "set_states", "step_in"]

# As Accelerate calls them (`RNG_STATE_NAME` and what it adds).
FILE: Final = "random_states_{}.pkl"


def gathered(session: Session, step: int) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Gather the RNG states of all ranks, with the number of calls of ``accumulate``. Collective.

    Returns:
        For each data rank the states of its first rank, in the format of Accelerate's file; and the states of each
        other rank that differ from those of its first rank.
    """
    states, _, others = of_groups(_states(step), None, session.data_ranks(), "random states of all ranks")
    return states, others


def step_in(folder: Path) -> int | None:
    """Progress of gradient accumulation stored in ``folder``; ``None`` if it is not in there."""
    path = folder / FILE.format(0)
    step: int | None = load(path).get("step") if path.exists() else None
    return step


def set_states(states: Mapping[str, Any]) -> None:
    """Set the global generators of this rank."""
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    for kind in _accelerators():
        if (key := f"torch_{kind}_manual_seed") in states:
            torch.get_device_module(kind).set_rng_state_all(states[key])


def _states(step: int) -> dict[str, Any]:
    """RNG states of this rank, in the format of Accelerate's file."""
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
