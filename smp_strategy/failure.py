"""Show the first failure, on every rank.

When one rank fails, the others fail a moment later with "connection closed by peer", and those secondary errors are
what people read first. So the rank that fails leaves its traceback in the store through which the ranks met, before
its connections close; a rank whose connection breaks looks there and says what really happened.

The functions that take a ``store`` do nothing but that; :func:`blame` decides whose fault an exception is.

The store may live in a rank that is stopped, and a call of it would never return. So it is called by a thread of its
own, which is given up after some seconds (:class:`StoreCall`).
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, NoReturn, TypeVar, final

import torch.distributed as dist

from smp_strategy.errors import PeerFailedError, SMPError

__all__ = ["StoreCall", "blame", "first_failure", "forget", "publish", "raise_lost"]

_COUNT = "smp_strategy/failures"
_FIRST = "smp_strategy/first_failure"
# A rank that fails publishes before its sockets close; this covers the time in which both are under way.
_PATIENCE_SECONDS = 2.0
# How long a store may take to answer.
_ANSWER_SECONDS = 5.0
_BROKEN_CONNECTION = ("gloo", "nccl", "connection", "socket", "broken pipe", "pair closure", "recvbytes", "sendbytes")


T = TypeVar("T")


@final
class StoreCall(Generic[T]):
    """A call of a store that may never return; it is made at once.

    Args:
        call: what is called, in a thread of its own.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._make, name="smp store", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has returned."""
        return not self._thread.is_alive()

    def within(self, seconds: float) -> bool:
        """Wait for it no longer than that; whether it is over."""
        self._thread.join(seconds)
        return self.is_over

    def get(self) -> T:
        """What it has returned, once it is over; raises what it has raised."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # `None` may be what is returned

    def _make(self) -> None:
        try:
            self._value = self._call()
        except Exception as error:
            self._error = error


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


def forget(store: dist.Store) -> None:
    """All ranks go on together: what has failed before is over."""
    with suppress(Exception):
        store.delete_key(_FIRST)
        store.delete_key(_COUNT)


def blame(error: Exception) -> Exception:
    """Publish ``error``, or find the error of another rank behind it.

    Returns:
        ``error`` itself where it arose on this rank; a :class:`PeerFailedError` with the other rank's traceback in
        front where it is only the broken connection that this rank noticed.
    """
    if isinstance(error, PeerFailedError) or not dist.is_initialized():
        return error
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if not _is_broken_connection(error):
        text = "".join(traceback.format_exception(error))
        StoreCall(lambda: publish(store, rank, text)).within(_ANSWER_SECONDS)
        return error
    search = StoreCall(lambda: _search(store))
    if not search.within(_ANSWER_SECONDS) or (culprit := search.get()) is None:
        return error
    return PeerFailedError(f"{culprit}\nrank {rank} lost its connection because of that: {error}")


def _search(store: dist.Store) -> str | None:
    """The first failure, which may be about to be published."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with suppress(Exception):  # a store that is gone is asked once: torch writes pages about each further call
        while not store.check([_FIRST]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return store.get(_FIRST).decode()
    return None


def raise_lost(error: RuntimeError, ranks: int | Sequence[int], doing: str) -> NoReturn:
    """A connection to another rank has failed with ``error``: raise the error of the rank that failed.

    Called where ``error`` is caught, and no context manager, because every message passes through several such places.

    Args:
        error: what was caught; one of this package's own is raised as it is.
        ranks: global rank of the other one, or of those of which it may be any.
        doing: what was done, for messages: "sending a tensor to".
    """
    if isinstance(error, SMPError):
        raise error
    cause = blame(error)
    if cause is not error:
        raise cause from error
    ranks = [ranks] if isinstance(ranks, int) else ranks
    several = len(ranks) > 1
    who = f"{'ranks' if several else 'rank'} {', '.join(map(str, ranks))}"
    raise PeerFailedError(
        f"While {doing} {who}, the connection failed: {error}\n"
        f"{'One of them' if several else who.capitalize()} stopped or is stuck; its own output says why."
    ) from error


def _is_broken_connection(error: Exception) -> bool:
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    # gloo raises bare RuntimeErrors
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _BROKEN_CONNECTION)
