"""Rendezvous for collective calls such as save and load: ranks that call something else get an error instead of a hang.

Saving collects parts from all ranks. A script that does it on one rank only (``if accelerator.is_main_process:
accelerator.save_state()``) would leave that rank waiting for the others, which wait for it elsewhere. So before such a
call all ranks tell each other its name, and a rank that comes alone gets an error
(:mod:`smp_strategy.distributed.deadlock`).

An operation that a rank then does by itself (write a file, read one) may fail on that rank alone; :func:`alike` lets
all ranks fail then. :func:`decided_by` is for what a single rank decides, or does, for all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.errors import ApartError, PeerFailedError, SMPError

__all__ = ["alike", "decided_by", "meet"]

T = TypeVar("T")


def meet(call: str) -> None:
    """Wait until all ranks make this ``call``. Collective.

    Raises:
        ApartError: ranks make different calls, do not come, or wait in a step for this one.
        PeerFailedError: another rank has failed.
    """
    if dist.get_world_size() > 1:
        collectives.barrier(f"`{call}`")


@contextmanager
def alike(doing: str) -> Iterator[None]:
    """Context of an operation that fails on all ranks if it fails on one. Collective at its end.

    Args:
        doing: Name of the operation, for messages: "saving to x".

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
        if error is not None:  # the reason why this rank is not where the others are
            raise error from None
        raise
    # The rank on which it arose raises its own error, with its place.
    if error is not None:
        raise error
    failed = {rank: report for rank, report in enumerate(found) if report is not None}
    if failed:
        rank, summary = next(iter(failed.items()))
        raise PeerFailedError(f"Rank {rank} failed while {doing}: {summary}")


def decided_by(source: int, decide: Callable[[], T], doing: str = "a decision of a single rank") -> T:
    """Broadcast the result of ``decide`` on the global rank ``source``, or raise its error everywhere. Collective."""
    found: tuple[T | None, Exception | None] = (None, None)
    if dist.get_rank() == source:
        try:
            found = decide(), None
        except Exception as error:
            found = None, error
    decision, problem = collectives.tell(found, source, doing)
    if problem is not None:
        raise problem
    return decision  # type: ignore[return-value]
