"""Calls that only the main process makes: the other ranks take part, from the place that they have come to meanwhile.

Published scripts save inside of ``if accelerator.is_main_process:``. A model that is spread over ranks takes all of
them for that. So the main process says where it goes on, and the others listen before they do anything that needs it::

    main process   update | save_state ------------->| next batch          says: save_state; go on
    other rank     update |  next batch: listens ... takes part ... | go on

[Note: rounds] What all ranks do together (an update, a gather, a save) begins a *round*. Within a round the main
process sends one small message to each rank wherever it goes on: at each *place* (a batch is read, or the model is
called) and before the next thing that all do together. The others wait for it there. The message says that the main
process goes on, too, or names a call. Then the others take part, and listen again, unless it is their own call. So a
call of the main process alone works wherever it stands between two places, with the random streams and the batches of
all ranks as if every rank had made it. Only between the backward pass that ends an accumulation and its update nobody
listens.

Replicas evaluate each for itself, one more often than another. So a call without gradients is a place only if it is the
first of its round, and none where the model is whole on each rank: published scripts make it on the main process alone.
A rank that comes to more places than the main process waits for the message that all do something together, and listens
no more in this round; one that comes to fewer skips what is left.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeVar, final

import torch
import torch.distributed as dist

from smp_strategy.distributed import pending_messages
from smp_strategy.distributed.deadlock import watch_of
from smp_strategy.distributed.message_tags import MAIN_PROCESS
from smp_strategy.distributed.rendezvous import alike, decided_by, meet
from smp_strategy.distributed.wait_positions import Condition

__all__ = ["MainProcessCalls"]

T = TypeVar("T")

_CHANNEL: Final = "where the main process goes on"
_DOING: Final = "the main process to go on"
# Messages of the main process that name no call: it has passed a place, or it does what all ranks do together.
_PASSES: Final = ("passes",)
_MEETS: Final = ("meets",)
_WORDS: Final = (_PASSES, _MEETS)
# Messages to a rank that has not heard them yet.
_MOST_PENDING: Final = 64


@final
class MainProcessCalls:
    """What the main process of one Accelerator tells the other ranks. See [Note: rounds].

    Attributes:
        take_part: Makes a call, given as plain values, together with the main process.
        moves_on: Called before a rank does something that others take part in.
    """

    def __init__(self) -> None:
        self.take_part: Callable[[Any], None] = _refuse
        self.moves_on: Callable[[], None] = lambda: None
        self._round: tuple[int, int] | None = None  # how often rounds have begun anew, and the number; `None`: none
        self._num_begins = 0
        self._has_passed = False  # a place of this round
        self._has_heard = False  # that the main process has passed the end of this round, or has said so
        self._depth = 0  # of calls that all ranks make
        self._waits: deque[Callable[[], None]] = deque()

    def begin(self) -> None:
        """Begin the first round. Collective."""
        self._num_begins += 1
        self._round = self._num_begins, -1
        self._begin_round()

    def end(self) -> None:
        """End all rounds, when every rank has come here. Collective."""
        self._meet(_MEETS)
        self._round = None

    def pass_by(self, *, if_first: bool = False) -> None:
        """Pass a place: tell the other ranks, or listen to the main process and take part in its calls."""
        self._move_on()
        if not self._is_on or self._has_heard or (if_first and self._has_passed):
            return
        self._has_passed = True
        if dist.get_rank() == 0:
            self._say(_PASSES)
            return
        while (said := self._heard()) not in _WORDS:
            self._join(said)
        self._has_passed, self._has_heard = True, said == _MEETS

    def finish(self) -> None:
        """End the places of this round, because all ranks do something together."""
        self._meet(_MEETS)
        self._has_heard = self._has_heard or self._is_on

    def update(self) -> None:
        """Begin a round, because all ranks update the weights."""
        self.finish()
        self._begin_round()

    @contextmanager
    def together(self, call: Any = _MEETS, meeting: str = "", doing: str = "") -> Iterator[None]:
        """Context of a call that all ranks make.

        Args:
            call: Its name, what it is about, and plain arguments by which others can take part in it; default: they
                cannot. A call of the main process with the same name, about the same, counts as this one: if it was
                another, the others take part in this one later.
            meeting: Name of the call for :func:`~smp_strategy.distributed.rendezvous.meet`, if ranks meet.
            doing: Name of an operation that fails on all ranks if it fails on one.
        """
        self._meet(call)
        with self._joint(), alike(doing) if doing else nullcontext():
            if meeting:
                meet(meeting)
            yield

    def decided(self, decide: Callable[[], T], doing: str = "a decision of rank 0") -> T:
        """Result of ``decide`` on the main process, or its error. Collective."""
        return decided_by(0, decide, doing)

    @contextmanager
    def asked(self, call: Any) -> Iterator[bool]:
        """Context of a call that a rank makes where it cannot do without; gives whether all ranks make it.

        The main process may make it alone, others only where it does.
        """
        comes = self._is_on and not self._has_heard
        if comes and dist.get_rank() == 0:
            self._say(call)
        elif comes:
            while (said := self._heard()) not in _WORDS and said[:2] != call[:2]:
                self._join(said)
            comes = said not in _WORDS
        with self._joint() if comes else nullcontext():
            yield comes

    def _move_on(self) -> None:
        if not self._depth:
            self.moves_on()

    @property
    def _is_on(self) -> bool:
        return self._round is not None and not self._depth and dist.is_initialized() and dist.get_world_size() > 1

    def _begin_round(self) -> None:
        if self._round is not None and not self._depth:
            self._round = self._round[0], self._round[1] + 1
            self._has_passed = self._has_heard = False

    def _meet(self, call: Any) -> None:
        self._move_on()
        if not self._is_on or self._has_heard:
            return
        if dist.get_rank() == 0:
            self._say(call)
            return
        while (said := self._heard()) != _MEETS and said[:2] != call[:2]:
            if said != _PASSES:
                self._join(said)

    def _join(self, call: Any) -> None:
        with self._joint():
            self.take_part(call)

    @contextmanager
    def _joint(self) -> Iterator[None]:
        self._begin_round()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def arrive(self, *, but: int = 0) -> None:
        """Wait until the other ranks have heard everything, but for so many messages."""
        if len(self._waits) <= but or not dist.is_initialized():
            return
        with watch_of().waiting(lambda: [[]], _world(), _DOING):
            while len(self._waits) > but:
                self._waits.popleft()()

    def _say(self, said: Any) -> None:
        assert self._round is not None
        # Not for all: the main process would stand still until the others come to their next places.
        self.arrive(but=_MOST_PENDING * dist.get_world_size())
        parts = []
        if said in _WORDS:
            size = -1 - _WORDS.index(said)
        else:
            content = bytearray(pickle.dumps(said))
            size, parts = len(content), [torch.frombuffer(content, dtype=torch.uint8)]
        parts = [torch.tensor([*self._round, size], dtype=torch.int64, device="cpu"), *parts]
        watch_of().count(_CHANNEL, _DOING)
        for rank in range(1, dist.get_world_size()):
            self._waits += [pending_messages.send(part, rank, MAIN_PROCESS, _world()) for part in parts]

    def _heard(self) -> Any:
        """The next message of the main process in this round."""
        assert self._round is not None
        while True:
            number, said = self._received()
            if number >= self._round:  # else it is of a round that an error has ended on some ranks only
                return said

    def _received(self) -> tuple[tuple[int, int], Any]:
        """The next message, and its round."""
        head = torch.zeros(3, dtype=torch.int64, device="cpu")
        needs = [[Condition(0, _CHANNEL, watch_of().count(_CHANNEL, _DOING))]]
        with watch_of().waiting(lambda: needs, _world(), _DOING):
            pending_messages.receive(head, 0, MAIN_PROCESS, _world())()
            begins, number, size = head.tolist()
            if size < 0:
                return (begins, number), _WORDS[-1 - size]
            content = torch.empty(size, dtype=torch.uint8, device="cpu")
            pending_messages.receive(content, 0, MAIN_PROCESS, _world())()
        return (begins, number), pickle.loads(content.numpy().tobytes())


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _refuse(call: Any) -> None:
    raise AssertionError(f"nobody takes part in {call}")
