"""Calls that all ranks must make together, and what is said if they do not.

Saving collects parts from all ranks. A script that does it on one rank only (``if accelerator.is_main_process:
accelerator.save_state()``) would leave that rank waiting for the others, which wait for it elsewhere. So before such a
call all ranks tell each other its name, and one that comes alone is told so (:mod:`smp_strategy.distributed.deadlock`).

What a rank does by itself meanwhile (write a file, read one) may fail there alone; :func:`alike` lets all fail then.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.errors import ApartError, PeerFailedError, SMPError

__all__ = ["alike", "meet"]


def meet(call: str) -> None:
    """Wait until all ranks make this ``call``. Collective.

    Args:
        call: its name, for messages.

    Raises:
        ApartError: ranks make different calls, do not come, or wait in a step for this one.
        PeerFailedError: another rank has failed.
    """
    if dist.get_world_size() > 1:
        collectives.barrier(f"`{call}`")


@contextmanager
def alike(doing: str) -> Iterator[None]:
    """What a rank does in here by itself fails on all ranks if it fails on one. Collective when it is over.

    Args:
        doing: what that is, for messages: "saving to x".

    Raises:
        PeerFailedError: it has failed on another rank.
    """
    error: Exception | None = None
    try:
        yield
    except ApartError:
        raise
    except Exception as caught:
        error = caught
    mine = None if error is None else f"{type(error).__name__}: {error}"
    try:
        found = collectives.gather_objects(mine, f"the end of {doing}")
    except SMPError:
        if error is not None:  # it is why this rank is not where the others are
            raise error from None
        raise
    # Where it arose is told by that rank, which raises it.
    if error is not None:
        raise error
    failed = {rank: report for rank, report in enumerate(found) if report is not None}
    if failed:
        rank, summary = next(iter(failed.items()))
        raise PeerFailedError(f"Rank {rank} failed while {doing}: {summary}")
