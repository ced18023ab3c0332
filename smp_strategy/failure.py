"""Show the first failure, on every rank.

When one rank fails, the others fail a moment later with "connection closed by peer", and those secondary errors are
what people read first. So the rank that fails leaves its traceback in the store through which the ranks met, before
its connections close; a rank whose connection breaks looks there and says what really happened.

The functions that take a ``store`` do nothing but that; :func:`blame` decides whose fault an exception is.
"""

import time
import traceback
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from smp_strategy.errors import PeerFailedError, SMPError

__all__ = ["blame", "first_failure", "publish", "raise_lost"]

_COUNT = "smp_strategy/failures"
_FIRST = "smp_strategy/first_failure"
# A rank that fails publishes before its sockets close; this covers the time in which both are under way.
_PATIENCE_SECONDS = 2.0
_BROKEN_CONNECTION = ("gloo", "nccl", "connection", "socket", "broken pipe", "recvbytes", "sendbytes")


def publish(store: dist.Store, rank: int, text: str) -> None:
    """Leave ``text`` (a traceback) for the other ranks, unless a rank has failed before this one."""
    # The store may live in a process that has ended already; then nobody is left to read it.
    with suppress(Exception):
        if store.add(_COUNT, 1) == 1:
            store.set(_FIRST, f"rank {rank} failed first:\n{text}")


def first_failure(store: dist.Store) -> str | None:
    """What the rank that failed first has published, or ``None``. Does not wait."""
    with suppress(Exception):
        if store.check([_FIRST]):
            return store.get(_FIRST).decode()
    return None


def blame(error: Exception) -> Exception:
    """Publish ``error``, or find the error of another rank behind it.

    Returns:
        ``error`` itself where it arose on this rank; a :class:`PeerFailedError` with the other rank's traceback in
        front where it is only the broken connection that this rank noticed.
    """
    if isinstance(error, PeerFailedError) or not dist.is_initialized():
        return error
    store = dist.distributed_c10d._get_default_store()
    if not _is_broken_connection(error):
        publish(store, dist.get_rank(), "".join(traceback.format_exception(error)))
        return error
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (culprit := first_failure(store)) is None:
        if time.monotonic() > deadline:
            return error
        time.sleep(0.05)
    return PeerFailedError(f"{culprit}\nrank {dist.get_rank()} lost its connection because of that: {error}")


def raise_lost(error: RuntimeError, rank: int, doing: str) -> NoReturn:
    """A connection to another rank has failed with ``error``: raise the error of the rank that failed.

    Called where ``error`` is caught, and no context manager, because every message passes through several such places.

    Args:
        error: what was caught; one of this package's own is raised as it is.
        rank: the other one's global rank.
        doing: what was done, for messages: "sending a tensor to".
    """
    if isinstance(error, SMPError):
        raise error
    cause = blame(error)
    if cause is not error:
        raise cause from error
    raise PeerFailedError(
        f"While {doing} rank {rank}, the connection failed: {error}\n"
        f"Rank {rank} stopped or is stuck; its own output says why."
    ) from error


def _is_broken_connection(error: Exception) -> bool:
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    # gloo raises bare RuntimeErrors
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _BROKEN_CONNECTION)
