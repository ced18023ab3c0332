"""Calls that all ranks must make together, and what is said if they do not.

Saving collects parts from all ranks. A script that does it on one rank only (``if accelerator.is_main_process:
accelerator.save_state()``) would leave that rank waiting for the others, which wait for it elsewhere. So before such a
call a rank says in the store of the process group where it is, and goes on when all have said the same. The last to
come compares; and a rank that waits for long looks whether the others wait for it in a step of the pipeline
(:mod:`smp_strategy.pipeline.watch`).

What a rank does by itself meanwhile (write a file, read one) may fail there alone; :func:`alike` lets all fail then.
"""

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from smp_strategy.errors import PeerFailedError, SMPError, UnsupportedError
from smp_strategy.failure import first_failure
from smp_strategy.pipeline.watch import Watch, user_code

__all__ = ["ApartError", "alike", "meet"]

_KEY: Final = "smp_strategy/meeting"
# How long a rank waits before it looks around, then between looks, and when it says that it waits.
PATIENCE_SECONDS: Final = 5.0
PAUSE_SECONDS: Final = 1.0
WARNING_SECONDS: Final = 60.0


class ApartError(SMPError):
    """Ranks are in different places; those of them that waited know it, and will not meet again."""


def meet(call: str, replica: Sequence[int] = (), *, timeout: timedelta | None = None) -> None:
    """Wait until all ranks make this ``call``. Collective.

    Args:
        call: its name, for messages.
        replica: the ranks that run steps together with this one.
        timeout: longest wait; ``None``: that of torch's process groups.

    Raises:
        ApartError: ranks make different calls, do not come, or wait in a step for this one.
        PeerFailedError: another rank has failed.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    # Each rank's own count: there is nothing that a new Accelerator, or a second one, could count anew.
    number = store.add(f"{_KEY}/count/{rank}", 1)
    key = f"{_KEY}/{number}"
    store.set(f"{key}/{rank}", json.dumps([call, user_code()]))
    store.add(f"{key}/at/{call}", 1)
    if store.add(f"{key}/arrived", 1) == world_size:
        is_same = store.add(f"{key}/at/{call}", 0) == world_size
        store.set(f"{key}/outcome", "" if is_same else _story(_present(store, key, world_size)))
        _forget(store, f"{_KEY}/{number - 1}", world_size)  # who has come here has left that
    _wait(store, key, call, Watch(rank, replica or [rank]), timeout or dist.default_pg_timeout)
    if story := store.get(f"{key}/outcome").decode():
        raise ApartError(story)


@contextmanager
def alike(doing: str, replica: Sequence[int] = ()) -> Iterator[None]:
    """What a rank does in here by itself fails on all ranks if it fails on one. Collective when it is over.

    Args:
        doing: what that is, for messages: "saving to x".
        replica: see :func:`meet`.

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
    try:
        meet(f"the end of {doing}", replica)
    except SMPError:
        if error is not None:  # it is why this rank is not where the others are
            raise error from None
        raise
    # Where it arose is told by that rank, which raises it.
    mine = None if error is None else f"{type(error).__name__}: {error}"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if error is not None:
        raise error
    failed = {rank: report for rank, report in enumerate(found) if report is not None}
    if failed:
        rank, summary = next(iter(failed.items()))
        raise PeerFailedError(f"Rank {rank} failed while {doing}: {summary}")


def _wait(store: dist.Store, key: str, call: str, watch: Watch, timeout: timedelta) -> None:
    """Until the outcome is known, as long as it can be."""
    began, patience, has_warned = time.monotonic(), PATIENCE_SECONDS, False
    while not _is_set(store, f"{key}/outcome", patience):
        try:
            watch.look([], ())
        except UnsupportedError as error:
            raise ApartError(str(error)) from None
        patience, waited = PAUSE_SECONDS, time.monotonic() - began
        if culprit := first_failure(store):
            raise PeerFailedError(f"{culprit}\nrank {dist.get_rank()} waited for it in `{call}`.")
        missing = sorted(set(range(dist.get_world_size())) - _present(store, key, dist.get_world_size()).keys())
        if waited > timeout.total_seconds():
            raise ApartError(f"Ranks {missing} have not come to `{call}` within {timeout}. {_REMEDY}")
        if waited > WARNING_SECONDS and not has_warned:
            has_warned = True
            warnings.warn(f"Ranks {missing} have not come to `{call}` for {waited:.0f} s. {_REMEDY}", stacklevel=4)
    watch.go_on()


def _is_set(store: dist.Store, key: str, seconds: float) -> bool:
    began = time.monotonic()
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:  # how a store says that the time is over
        if time.monotonic() - began < 0.9 * seconds:
            raise
        return False
    return True


def _present(store: dist.Store, key: str, world_size: int) -> dict[int, tuple[str, str]]:
    """Where the ranks are that have come: their calls, and the lines of the user's code."""
    keys = {rank: f"{key}/{rank}" for rank in range(world_size)}
    return {rank: tuple(json.loads(store.get(each))) for rank, each in keys.items() if store.check([each])}


def _forget(store: dist.Store, key: str, world_size: int) -> None:
    calls = {call for call, _ in _present(store, key, world_size).values()}
    for each in (*range(world_size), "arrived", "outcome", *(f"at/{call}" for call in calls)):
        store.delete_key(f"{key}/{each}")


def _story(present: dict[int, tuple[str, str]]) -> str:
    lines = "\n".join(f"  rank {rank}: `{call}` ({place})" for rank, (call, place) in sorted(present.items()))
    return f"Ranks are in different calls that all of them have to make together:\n{lines}\n{_REMEDY}"


_REMEDY: Final = (
    "The model is spread over the ranks, so all of them must make such calls, in the same order: take `save_state`, "
    "`load_state`, `save_model`, `get_state_dict`, `save_checkpoint`, `resume_from_checkpoint` out of `if "
    "accelerator.is_main_process:` or `if rank == 0:` (each process writes only what is its own in any case)."
)
