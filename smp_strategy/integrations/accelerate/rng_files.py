"""Where the global random generators of all ranks are, in Accelerate's own files.

Accelerate writes a file for each process. Here it is one for each rank that reads samples of its own, so that a plain
run with that many processes goes on with them, and the other way round. The ranks of a pipeline draw alike, so that one
file serves them all; where they do not (the main process has drawn for itself), each has its own again if a run goes on
with the same layout.

Generators of data loaders, which Accelerate leaves out, go into our own file: without them the passes that follow
would shuffle in another way. (A pass that has begun is repeated up to where it was only with
``use_seedable_sampler=True``, which begins each pass with a seed.)

In Accelerate's files stands also how far gradient accumulation has come. That must be the same on all ranks, also on
those for which there is no file.
"""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from accelerate.utils import load

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.rng_state import exceptions_to_first
from smp_strategy.integrations.accelerate.session import Session
from smp_strategy.integrations.data.resumable_loader import generators_of

__all__ = ["FILE", "gathered", "of_loaders", "set_loaders", "set_states", "step_in"]

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
    states = collectives.gather_objects(_states(step), "random states of all ranks")
    groups = session.data_ranks()
    return [states[ranks[0]] for ranks in groups], exceptions_to_first(states, groups)


def of_loaders(loaders: Iterable[Any]) -> list[list[torch.Tensor]]:
    """The states of the generators that each of the loaders brings along."""
    return [[generator.get_state() for generator in _generators(loader)] for loader in loaders]


def set_loaders(loaders: Iterable[Any], states: Iterable[list[torch.Tensor]]) -> None:
    """Let generators of ``loaders`` go on from there; those of a loader that has others now are left alone."""
    for loader, kept in zip(loaders, states, strict=False):
        generators = _generators(loader)
        if len(generators) == len(kept):
            for generator, state in zip(generators, kept, strict=True):
                generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    return generators_of(getattr(loader, "base_dataloader", loader))


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
