"""Random generators of ranks, in files and across ranks.

In a file a state is a dict of tensors and numbers, which loads without unpickling code.

Ranks that read the same samples draw alike, so a file has one state for each of these groups, and one more for each
rank that differs (the main process has drawn to show a sample). A run with the same layout restores all of them, a run
with another layout those of the groups.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.device import generator_of, is_host
from smp_strategy.distributed.rng_state import RngState, drawing_from, global_state, set_global_state

__all__ = ["are_equal", "exceptions_to_first", "of_groups", "of_rank", "packed", "set_of_rank", "undrawn", "unpacked"]


def undrawn() -> AbstractContextManager[None]:
    """Context of code that draws; afterwards the global generators of the host are where they were before."""
    return drawing_from(global_state())


def packed(state: RngState) -> dict[str, Any]:
    """``state`` for a file: tensors, numbers and strings only."""
    (for_torch,), (version, words, gauss), for_numpy = state
    found: dict[str, Any] = {
        "torch": _as_tensor(for_torch),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    if for_numpy is not None:
        kind, key, position, has_gauss, cached = for_numpy
        numbers = {"position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)}
        found["numpy"] = {"kind": str(kind), "key": _as_tensor(key), **numbers}
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


def of_groups(
    state: Any, more: Any, groups: Sequence[Sequence[int]], doing: str, *, on_first: bool = False
) -> tuple[list[Any], list[Any], dict[int, Any]]:
    """States of the first rank of each group, what it has ``more``, and states of others that differ. Collective.

    Args:
        more: What a file has for a group beside the state.
        groups: Ranks that draw alike.
        on_first: Whether only global rank 0 gets the result; elsewhere all of it is empty.
    """
    mine = state, more
    found = collectives.collect(mine, 0, doing) if on_first else collectives.gather_objects(mine, doing)
    if not found:
        return [], [], {}
    states = [each for each, _ in found]
    firsts = [ranks[0] for ranks in groups]
    return [states[rank] for rank in firsts], [found[rank][1] for rank in firsts], exceptions_to_first(states, groups)


def exceptions_to_first(states: Sequence[Any], groups: Sequence[Sequence[int]]) -> dict[int, Any]:
    """The states of ranks that differ from the first rank of their group."""
    return {
        rank: states[rank] for ranks in groups for rank in ranks[1:] if not are_equal(states[rank], states[ranks[0]])
    }


def are_equal(one: Any, other: Any) -> bool:
    """Whether two nested states, which may contain tensors and numpy arrays, are the same."""
    (mine, form), (theirs, other_form) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return form == other_form and all(map(_is_same, mine, theirs))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
