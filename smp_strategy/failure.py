"""Show the first failure, on every rank.

When one rank fails, the others fail a moment later with "connection closed by peer", and those secondary errors are
what people read first. So the rank that fails leaves its traceback in the store through which the ranks met, before
its connections close; a rank whose connection breaks looks there and says what really happened.

The functions that take a ``store`` do nothing but that; :func:`blame` decides whose fault an exception is.
"""

import time
import traceback
from contextlib import suppress
from typing import final

import torch.distributed as dist

from smp_strategy.errors import PeerFailedError, SMPError

__all__ = ["Connection", "blame", "first_failure", "publish"]

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


@final
class Connection:
    """Turns a connection to another rank that breaks inside of this context into the error of the rank that failed.

    A class, because every message passes through several of these, and a generator takes twice as long.

    Args:
        rank: the other one's global rank.
        doing: what is done, for messages: "sending a tensor to".
    """

    __slots__ = ("_doing", "_rank")

    def __init__(self, rank: int, doing: str) -> None:
        self._rank = rank
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, SMPError):
            return  # the connection is fine
        cause = blame(error)
        if cause is not error:
            raise cause from error
        raise PeerFailedError(
            f"While {self._doing} rank {self._rank}, the connection failed: {error}\n"
            f"Rank {self._rank} stopped or is stuck; its own output says why."
        ) from error


def _is_broken_connection(error: Exception) -> bool:
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    # gloo raises bare RuntimeErrors
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _BROKEN_CONNECTION)
