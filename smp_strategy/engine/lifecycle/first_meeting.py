"""First meeting: ranks compare their settings in the rendezvous store before torch connects them.

torch makes a process group without a word, and holds Python's lock meanwhile. If a rank has ended, is stopped, or
counts other ranks (``devices`` of its own), the rest waits for half an hour, and nothing can tell them. So ranks meet
in the store first, where a wait can be looked at: each writes its settings, rank 0 compares them and writes the
verdict. The process group is made with the same store.

The store may be that of torchrun, which outlives its ranks: it has the keys of earlier groups and of attempts that have
failed. So each meeting has a number of its own, which rank 0 draws and tells each rank that arrives. The number of
restarts (``TORCHELASTIC_RESTART_COUNT``) does not do: each node counts its own.

The store may live in a process that is stopped, so each call of it is a thread's, which can be left.

[Note: restarts] Under torchrun, torch's own rendezvous reads addresses of ranks that have gone, and a restart fails now
and then (``connectFullMesh failed``). So ranks meet first. Doors that let torch connect the ranks give it
:func:`init_method`, and compare settings later.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, Final, TypeVar, final

import torch.distributed as dist

from smp_strategy.distributed.agreement.common_settings import Settings, differences, explained, named
from smp_strategy.distributed.background_call import BackgroundCall
from smp_strategy.errors import ConfigError, PeerFailedError

__all__ = ["FirstMeeting", "SILENCE_SECONDS", "init_method"]

SILENCE_SECONDS: Final = 60.0
"""Wait after which a line in the log names the ranks that have not come."""
_PAUSES: Final = (0.01, 0.25)
# Time for the others to read why the run ends.
_FAREWELL_SECONDS: Final = 2.0
# Connections that wait to be accepted, as in torch: all ranks come at once.
_BACKLOG: Final = 2048
_ARRIVALS: Final = "smp_strategy/arrivals"
_SCHEME: Final = "smp-meeting"
_LOG: Final = logging.getLogger("smp_strategy")

T = TypeVar("T")


@final
class FirstMeeting:
    """Meeting of all ranks before their process group exists.

    Args:
        num_ranks: Number of ranks, as this one counts them.
        lost: Returns a sentence about a process of another rank that will never come, or nothing.
    """

    def __init__(
        self,
        address: tuple[str, int],
        rank: int,
        num_ranks: int,
        *,
        timeout: timedelta | None = None,
        lost: Callable[[], str] = str,
    ) -> None:
        self._address = address
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout = timeout or dist.default_pg_timeout
        self._lost = lost
        self._began = time.monotonic()
        self._has_told = False

    def compare(self, settings: Settings) -> dist.Store:
        """Compare ``settings``; returns the store, for the process group. Collective.

        Raises:
            ConfigError: Some differ, on all ranks that have come.
            PeerFailedError: A rank will not come, or has not within the timeout.
        """
        has_server = _is_served()
        host, port = self._address
        is_master = self._rank == 0 and not has_server

        def connect() -> dist.Store:
            options: dict[str, Any] = {"timeout": self._timeout, "wait_for_workers": False, "multi_tenant": True}
            if is_master and (listener := _listener(host, port)) is not None:
                options["master_listen_fd"] = listener
            return dist.TCPStore(host, port, None, is_master, **options)

        everything = self._wait(BackgroundCall(connect), lambda: [] if has_server else [0])
        number = self._numbered(everything)
        store = dist.PrefixStore(f"smp_strategy/meeting/{number}", everything)
        counted = {"the number of ranks": str(self._num_ranks), **settings}
        self._call(lambda: store.set(str(self._rank), json.dumps(counted)))
        verdict = self._judged(store, _Arrivals(everything, number))
        if verdict:
            raise ConfigError(verdict)
        everything.set_timeout(self._timeout)
        return dist.PrefixStore(f"smp_strategy/group/{number}", everything)

    def _numbered(self, everything: dist.Store) -> int:
        """The number of this meeting; other ranks wait for rank 0's."""
        if self._rank == 0:
            return self._call(lambda: everything.add("smp_strategy/meetings", 1))
        arrival = self._call(lambda: everything.add(_ARRIVALS, 1))
        key = f"{_ARRIVALS}/{arrival}"
        self._wait_until(lambda: everything.check([key]), lambda: [0])
        return int(self._call(lambda: everything.get(key)))

    def _judged(self, store: dist.Store, arrivals: "_Arrivals") -> str:
        everyone = range(self._num_ranks)
        if self._rank == 0:
            self._until(store, [str(rank) for rank in everyone], meanwhile=arrivals.answer)
            found = [json.loads(self._call(lambda rank=rank: store.get(str(rank)))) for rank in everyone]  # type: ignore[misc]
            verdict = explained(found) if differences(found) else ""
            self._call(lambda: store.set("verdict", verdict))
            if verdict:  # with which this process ends, and the store with it
                self._let_read(store)
            return verdict
        self._until(store, ["verdict"])
        verdict = self._call(lambda: store.get("verdict")).decode()
        self._call(lambda: store.add("readers", 1))
        return verdict

    def _let_read(self, store: dist.Store) -> None:
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while self._call(lambda: store.add("readers", 0)) < self._num_ranks - 1 and time.monotonic() < deadline:
            time.sleep(_PAUSES[0])

    def _until(self, store: dist.Store, keys: Sequence[str], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until ``store`` has all of ``keys``; ``meanwhile`` is called again and again."""

        def missing() -> list[int]:
            ranks = range(self._num_ranks)
            return [rank for rank in ranks if not self._call(lambda rank=rank: store.check([str(rank)]))]  # type: ignore[misc]

        def is_over() -> bool:
            meanwhile()
            return store.check(list(keys))

        self._wait_until(is_over, missing)

    def _wait_until(self, is_over: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        pause, longest = _PAUSES
        while not self._call(is_over):
            time.sleep(pause)
            pause = min(2 * pause, longest)
            self._check(missing)

    def _call(self, call: Callable[[], T]) -> T:
        """Result of a call of the store, which may be stopped."""
        return self._wait(BackgroundCall(call), list)

    def _wait(self, call: BackgroundCall[T], missing: Callable[[], Sequence[int]]) -> T:
        while not call.within(_PAUSES[1]):
            self._check(missing)
        return call.get()

    def _check(self, missing: Callable[[], Sequence[int]]) -> None:
        """Raise if the wait cannot end; tell of a long one."""
        if sentence := self._lost():
            raise PeerFailedError(sentence)
        waited = time.monotonic() - self._began
        is_over = waited >= self._timeout.total_seconds()
        if not is_over and (self._has_told or waited < SILENCE_SECONDS):
            return
        self._has_told = True
        absent = missing()
        who = named(absent) if absent else "the process that serves the store of the ranks, which does not answer"
        words = (
            f"Rank {self._rank} has waited {waited:.0f} s for all {self._num_ranks} ranks to begin the run together. "
            f"Missing: {who}. It may still import or build something, has ended (with exit code 0, say), never "
            "makes this call, or is stopped (by SIGSTOP or a debugger)."
        )
        if is_over:
            raise PeerFailedError(words)
        _LOG.warning(f"{words} It is waited for until the `timeout` of the process groups is over ({self._timeout}).")


@final
class _Arrivals:
    """What rank 0 tells the ranks that arrive in ``store``: the number of the meeting.

    It tells those of earlier meetings as well, who do not ask any more.
    """

    def __init__(self, store: dist.Store, number: int) -> None:
        self._store, self._number = store, number
        self._answered = 0

    def answer(self) -> None:
        """Tell those who have arrived since the last call."""
        for arrival in range(self._answered + 1, self._store.add(_ARRIVALS, 0) + 1):
            self._store.set(f"{_ARRIVALS}/{arrival}", str(self._number))
            self._answered = arrival


def init_method() -> str | None:
    """``init_method`` for a default group: torch's own, or a first meeting under torchrun. See [Note: restarts]."""
    return f"{_SCHEME}://" if _is_served() else None


def _rendezvous(url: str, timeout: timedelta = dist.default_pg_timeout) -> Iterator[tuple[dist.Store, int, int]]:
    """What torch asks for the store, this rank, and the number of ranks."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    yield FirstMeeting(address, rank, num_ranks, timeout=timeout).compare({}), rank, num_ranks


dist.register_rendezvous_handler(_SCHEME, _rendezvous)


def _listener(host: str, port: int) -> int | None:
    """Socket for the store that listens at ``host`` only; ``None``: torch makes one, which listens at all addresses.

    It is left to torch where other machines may know this one by another address: a name with several, or one that
    this machine has given to itself (127.0.1.1 of Debian), or an address that is translated on the way.
    """
    with suppress(OSError):  # an unknown name, an address of another machine, or torch serves this port already
        found = socket.getaddrinfo(host, port, socket.AF_INET if host == "localhost" else 0, socket.SOCK_STREAM)
        addresses = {(family, address[0]) for family, _, _, _, address in found}
        (family, address), *others = addresses
        if not others and (host in (address, "localhost") or not ip_address(address).is_loopback):
            return socket.create_server((str(address), port), family=family, backlog=_BACKLOG).detach()
    return None


def _is_served() -> bool:
    """Whether the store is torchrun's, which outlives its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
