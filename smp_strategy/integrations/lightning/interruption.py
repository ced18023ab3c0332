"""Whether ranks that an error has stopped can still save a checkpoint together.

Saving takes all ranks. If an error has stopped one of them, the others wait for it elsewhere, and it would wait for
them for ever. If it has stopped all of them in the same place between two steps (a signal that the Trainer has noticed,
a callback that gives up), nothing of what they have is half done, and they can save. They find that out in the store of
the process group: each tells its place, the last to come says yes, and who has waited too long says no. One answer
counts, that which was first.
"""

import time
from typing import Final

import torch.distributed as dist

__all__ = ["have_all_stopped"]

_KEY: Final = "smp_strategy/stopped"
PATIENCE_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05
_YES, _NO = "yes", "no"


def have_all_stopped(place: str | None) -> bool:
    """Whether all ranks ask this, of the same place; the answer is the same on all that do.

    Args:
        place: where this rank has stopped; ``None``: in the middle of something.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return place is not None
    store = dist.distributed_c10d._get_default_store()
    key = f"{_KEY}/{store.add(f'{_KEY}/count/{dist.get_rank()}', 1)}"
    deadline = time.monotonic() + PATIENCE_SECONDS
    if place is not None and store.add(f"{key}/at/{place}", 1) == dist.get_world_size():
        answer = _answered(store, key, _YES)
    elif place is None:
        answer = _answered(store, key, _NO)
    else:
        while not store.check([f"{key}/answer"]) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        answer = _answered(store, key, _NO)
    return answer == _YES


def _answered(store: dist.Store, key: str, answer: str) -> str:
    return store.compare_set(f"{key}/answer", "", answer).decode()
