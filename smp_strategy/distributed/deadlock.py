"""Deadlock detection: ranks that wait for each other for ever get an error instead.

All ranks must make the same calls. A rank that reads a value which the others do not read, saves alone, or stops alone
waits for others that wait for it elsewhere. Torch would end that after half an hour, without naming the reason.

So every wait for another rank is registered here with its condition, which costs two assignments. A thread of each
process checks once a second whether the same wait still lasts. After some seconds the rank publishes its position
(:mod:`smp_strategy.distributed.wait_positions`) in the store of the default process group, reads those of the others,
and decides. Positions are published again and again, and only those count that were equal twice: so at the time in
between all ranks were there at once. A wait that cannot end is broken off: a receive that times out breaks all
connections of its group, which is gloo's only way to give up a wait.

A rank that does not wait gives a sign of life four times a minute. A rank that is waited for and has been silent for a
minute is stopped (a signal, a frozen machine), and an error names it. One that lives and computes is waited for as long
as the process groups' timeout says; a line in the log tells where it is.

The store may live in a process that is stopped. So it is called by a thread
(:mod:`smp_strategy.distributed.background_call`), and a call that does not return is the sign of that.
"""

import logging
import math
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from os import getpid
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar, final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

from smp_strategy.distributed.background_call import BackgroundCall, call_every
from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.failure import current_run, first_failure, introduce, publish, raise_lost
from smp_strategy.distributed.handle import Handle
from smp_strategy.distributed.message_tags import NEVER_SENT
from smp_strategy.distributed.peer_processes import is_stopped, process_space
from smp_strategy.distributed.shutdown import call_at_exit
from smp_strategy.distributed.torch_private import default_store
from smp_strategy.distributed.wait_positions import Condition, Position, blockers, is_deadlock, story
from smp_strategy.errors import ApartError, PeerFailedError, SMPError

__all__ = ["BegunCollective", "MessageSender", "Watch", "beside", "user_code", "watch_of"]

PATIENCE_SECONDS: Final = 5.0
"""Age of a wait at which a rank publishes its position."""
PAUSE_SECONDS: Final = 1.0
"""Interval of the checks."""
LIFE_SECONDS: Final = 15.0
"""Interval of the signs of life of a rank that does not wait."""
SILENCE_SECONDS: Final = 60.0
"""Silence after which a rank that is waited for counts as stopped; at most the timeout."""
FAREWELL_SECONDS: Final = 0.5
_KEY: Final = "smp_strategy/position"
_OURS: Final = (
    *("torch", "smp_strategy", "threading", "concurrent", "queue", "contextlib", "weakref"),
    *("accelerate", "lightning", "pytorch_lightning", "transformers"),
)
# Most collectives of a group that a rank can be ahead of another.
_MOST_LATEST: Final = 32
_LOG: Final = logging.getLogger("smp_strategy")
# One watch per default process group, which is the process's own.
_WATCHES: "Final[WeakKeyDictionary[dist.ProcessGroup, Watch]]" = WeakKeyDictionary()

T = TypeVar("T")
Needs = list[list[Condition]]


class MessageSender(Protocol):
    """Sender of messages."""

    @property
    def sent(self) -> Collection[tuple[str, int]]:
        """Channel and tag of each message of this step."""


class BegunCollective(NamedTuple):
    """A collective that this rank has begun."""

    group: dist.ProcessGroup
    channel: str
    number: int
    doing: str

    @property
    def needs(self) -> Needs:
        """Conditions at other ranks so that it ends."""
        return [[Condition(rank, self.channel, self.number) for rank in dist.get_process_group_ranks(self.group)]]

    def work(self, finish: Callable[[], T], is_done: Callable[[], bool] | None = None) -> Handle[T]:
        """Handle of the collective, whose waits are watched; arguments as for :class:`Handle`."""
        return Handle(lambda: watch_of().until(self, finish), is_done)


@final
class _Wait:
    """A wait of this rank."""

    def __init__(self, needs: Callable[[], Needs], group: dist.ProcessGroup, doing: str) -> None:
        self.needs = needs
        self.group = group
        self.doing = doing
        self.verdict: SMPError | None = None


@final
class _Begun:
    """Collectives that this rank has begun in a channel."""

    def __init__(self) -> None:
        self.count = 0
        self.latest: deque[str] = deque(maxlen=_MOST_LATEST)


@final
class Watch:
    """Deadlock watch of this process. Get it by :func:`watch_of`."""

    def __init__(self) -> None:
        self.rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.senders: WeakSet[MessageSender] = WeakSet()
        self.timeout = dist.default_pg_timeout
        self.read = (0, False)
        self._wait: _Wait | None = None
        self._apart: set[int] = set()
        self._begun: dict[str, _Begun] = {}
        # State of the thread: the wait that it has observed, and since when.
        self._observed: ref[_Wait] | None = None  # not the wait itself, which keeps its group alive
        self._since, self._published = time.monotonic(), -math.inf
        self._turn = self._tick = 0
        self._call: BackgroundCall[dict[int, Position] | SMPError] | None = None
        self._before: dict[int, Position] = {}
        self._signs: dict[int, tuple[int, float]] = {}
        self._has_told = False
        self._process = (f"{socket.gethostname()} {process_space()}", getpid())
        self._stop = threading.Event()
        self._thread = call_every(PAUSE_SECONDS, partial(_look, ref(self)), "smp watch", self._stop)
        call_at_exit(self.close)

    def begin(self, group: dist.ProcessGroup, doing: str) -> BegunCollective:
        """Register a collective of ``group`` that begins now; all its ranks call this in the same order.

        Args:
            group: Ranks of the collective.
            doing: Purpose, in words that continue "waits for"; the same on all ranks.
        """
        channel = group.group_name
        return BegunCollective(group, channel, self.count(channel, doing), doing)

    def count(self, channel: str, doing: str) -> int:
        """Number of the collective that is begun now in ``channel``, from 1 on."""
        begun = self._begun.get(channel)
        if begun is None:
            begun = self._begun[channel] = _Begun()
        begun.count += 1
        begun.latest.append(doing)
        return begun.count

    def until(self, meeting: BegunCollective, finish: Callable[[], T]) -> T:
        """Call ``finish``, which blocks until the collective is over.

        Raises:
            ApartError: It never will be.
            PeerFailedError: Another rank has failed, or is stopped.
        """
        if self._apart and threading.get_ident() in self._apart:
            return finish()
        before, self._wait = self._wait, _Wait(lambda: meeting.needs, meeting.group, meeting.doing)
        try:
            return finish()
        except RuntimeError as error:
            self._explain(error)
        finally:
            self._wait = before

    @contextmanager
    def waiting(self, needs: Callable[[], Needs], group: dist.ProcessGroup, doing: str) -> Iterator[None]:
        """Context of a wait for one of several alternatives; raises as :meth:`until`.

        Args:
            needs: Returns the alternatives: lists of conditions, of which one list has to be met.
            group: Group of the messages.
            doing: Purpose, in words that continue "waits for".
        """
        before, self._wait = self._wait, _Wait(needs, group, doing)
        try:
            yield
        except RuntimeError as error:
            self._explain(error)
        finally:
            self._wait = before

    @contextmanager
    def calling(self, meeting: BegunCollective) -> Iterator[None]:
        """Context of a collective that the user calls, which may wait, and whose errors are the user's.

        Raises:
            ApartError: it will never be over.
        """
        before, wait = self._wait, _Wait(lambda: meeting.needs, meeting.group, meeting.doing)
        self._wait = wait
        try:
            yield
        except RuntimeError:
            if wait.verdict is not None:
                raise wait.verdict from None
            raise
        finally:
            self._wait = before

    def poll(self) -> None:
        """Raise if the wait cannot end; for waits that poll, to be called in each turn inside of :meth:`waiting`."""
        if self._wait is not None and self._wait.verdict is not None:
            raise self._wait.verdict

    def _explain(self, error: RuntimeError) -> NoReturn:
        wait = self._wait
        assert wait is not None
        if wait.verdict is not None:
            raise wait.verdict from None
        others = [rank for rank in dist.get_process_group_ranks(wait.group) if rank != self.rank]
        raise_lost(error, others, f"waiting for {wait.doing} together with")

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context of a thread beside the one that trains: its waits are not registered."""
        ident = threading.get_ident()
        self._apart.add(ident)
        try:
            yield
        finally:
            self._apart.discard(ident)

    def close(self) -> None:
        """End the thread. While it breaks off a wait, it would abort a process that ends without joining it."""
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        if self._call is not None:
            self._call.within(FAREWELL_SECONDS)

    # In the thread

    def look(self) -> None:
        """Check the current wait; called once per :data:`PAUSE_SECONDS`."""
        now, wait = time.monotonic(), self._wait
        if wait is not (self._observed and self._observed()):
            self._observed, self._since, self._before, self._signs = wait and ref(wait), now, {}, {}
            self._turn += 1
            self._has_told = False
        waited = 0.0 if wait is None else now - self._since
        is_long = waited >= PATIENCE_SECONDS
        if self._call is None:
            if is_long or now - self._published >= LIFE_SECONDS:
                self._tell(wait if is_long else None, now)
            return
        if not self._call.is_over:
            if wait is not None and min(waited, now - self._published + PATIENCE_SECONDS) >= self._silence:
                self._break_off(wait, PeerFailedError(_silent_store(wait.doing, self._silence)))
            return
        call, self._call = self._call, None
        with suppress(RuntimeError):  # a rank whose store is gone notices by its connections
            found = call.get()
            if wait is not None and is_long:
                self._judge(wait, found, now, waited)

    @property
    def _silence(self) -> float:
        return min(SILENCE_SECONDS, self.timeout.total_seconds())

    def _tell(self, wait: _Wait | None, now: float) -> None:
        self._tick += 1
        self._published = now
        needs = [] if wait is None else wait.needs()
        sent = {message for sender in self.senders for message in tuple(sender.sent)}
        begun = {channel: (each.count, tuple(each.latest)) for channel, each in tuple(self._begun.items())}
        turn, doing = (0, "") if wait is None else (self._turn, wait.doing)
        mine = Position(self._tick, turn, needs, begun, sent, doing, user_code(), self._process, self.read)
        if wait is not self._wait and wait is not None:
            return  # that wait is over meanwhile
        store, rank, size = default_store(), self.rank, self._world_size
        self._call = BackgroundCall(lambda: _exchange(store, rank, size if wait is not None else 0, mine))

    def _judge(self, wait: _Wait, found: "dict[int, Position] | SMPError", now: float, waited: float) -> None:
        if isinstance(found, SMPError):
            self._break_off(wait, found)
            return
        before, self._before = self._before, found
        for rank, each in found.items():
            if self._signs.get(rank, (-1, 0.0))[0] != each.tick:
                self._signs[rank] = each.tick, now
        still = {rank: each for rank, each in found.items() if each.stands_still(before.get(rank))}
        if self.rank not in still:
            return
        if is_deadlock(self.rank, still):
            self._break_off(wait, ApartError(story(still, door_words())))
        elif waited >= self._silence:
            self._tell_of_slow(wait, found, blockers(self.rank, still), now, waited)

    def _tell_of_slow(
        self, wait: _Wait, found: dict[int, Position], slow: Collection[int], now: float, waited: float
    ) -> None:
        quiet = self._silence - 2 * PATIENCE_SECONDS
        for rank in sorted(slow):
            _, since = self._signs.get(rank, (-1, self._since))
            if now - since >= quiet and _may_be_stopped(found.get(rank), self._process[0]):
                self._break_off(wait, PeerFailedError(_silent(rank, found.get(rank), wait.doing, waited)))
                return
        if not self._has_told and slow:
            self._has_told = True
            lines = "; ".join(f"rank {rank} ({_place(found.get(rank))})" for rank in sorted(slow))
            _LOG.warning(
                f"Rank {self.rank} has waited {waited:.0f} s for {wait.doing}. At work meanwhile: {lines}. They are "
                f"waited for until the `timeout` of the process groups is over ({self.timeout})."
            )

    def _break_off(self, wait: _Wait, verdict: SMPError) -> None:
        if wait is not self._wait or wait.verdict is not None:
            return
        wait.verdict = verdict
        if not isinstance(verdict, PeerFailedError):
            store, rank = default_store(), self.rank
            text, run = f"{type(verdict).__name__}: {verdict}", current_run()
            BackgroundCall(lambda: publish(store, rank, text, run)).within(PAUSE_SECONDS)
        peers = [number for number in range(wait.group.size()) if number != wait.group.rank()]
        with suppress(RuntimeError):  # the timeout that breaks the connections
            wait.group.recv([torch.empty(1, device="cpu")], peers[0], NEVER_SENT).wait(timedelta(milliseconds=1))


def watch_of() -> Watch:
    """Watch of this process, which lives as long as the default process group."""
    world = dist.group.WORLD
    assert world is not None
    watch = _WATCHES.get(world)
    if watch is None:
        watch = _WATCHES[world] = Watch()
        introduce()
    return watch


def beside() -> AbstractContextManager[None]:
    """Context of a thread beside the one that trains, if there are other ranks: see :meth:`Watch.apart`."""
    return watch_of().apart() if dist.is_initialized() else nullcontext()


def user_code() -> str:
    """Innermost line of the user's code in each thread that runs some."""
    lines = []
    for frame in sys._current_frames().values():
        here: Any = frame
        while here is not None:
            if str(here.f_globals.get("__name__", "")).split(".")[0] not in _OURS:
                lines.append(f"{here.f_code.co_filename}, line {here.f_lineno}, in {here.f_code.co_name}")
                break
            here = here.f_back
    return "; ".join(dict.fromkeys(lines)) or "outside of the user's code"


def _look(watch: "ref[Watch]") -> bool:
    """Let the watch look, if it lives: its thread keeps it alive only during a check."""
    alive = watch()
    if alive is None or not dist.is_initialized():
        return False
    alive.look()
    return True


def _exchange(store: dist.Store, rank: int, size: int, mine: Position) -> dict[int, Position] | SMPError:
    """Publish this rank's position, and read those of ``size`` ranks."""
    store.set(f"{_KEY}/{rank}", mine.encode())
    if size and (culprit := first_failure(store, current_run())):
        return PeerFailedError(f"{culprit}\nrank {rank} waited for {mine.doing}.")
    keys = {other: f"{_KEY}/{other}" for other in range(size)}
    return {other: Position.decode(store.get(key).decode()) for other, key in keys.items() if store.check([key])}


def _may_be_stopped(position: Position | None, machine: str) -> bool:
    """Whether a silent rank may be stopped, and is not in one long call that holds Python's GIL."""
    return position is None or position.process[0] != machine or is_stopped(position.process[1]) is not False


def _place(position: Position | None) -> str:
    return "it has not said where" if position is None else position.place


def _silent(rank: int, position: Position | None, doing: str, waited: float) -> str:
    if position is None:
        return (
            f"Rank {rank} has given no sign of life while this rank waited {waited:.0f} s for {doing}, nor before: it "
            "runs without smp_strategy (another strategy, or no plugin, on this rank alone), or it is stopped (by "
            "SIGSTOP or a debugger). Give all ranks the same options, and start the run again."
        )
    where = f"It was last seen at {position.place}."
    return (
        f"Rank {rank} has given no sign of life while this rank waited {waited:.0f} s for {doing}: it is stopped (by "
        f"SIGSTOP or a debugger) or its machine or network is down. {where} Let it go on or end it, and start the run "
        "again."
    )


def _silent_store(doing: str, seconds: float) -> str:
    return (
        f"The store of the process group has not answered for {seconds:.0f} s while this rank waited for {doing}: the "
        "process that it lives in, which is rank 0 unless torchrun has started the ranks, is stopped (by SIGSTOP or a "
        "debugger) or its machine or network is down. Let it go on or end it, and start the run again."
    )
