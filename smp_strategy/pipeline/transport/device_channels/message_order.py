"""Order of the messages on a directed edge that knows no tags: the same at both ends by construction.

Stages have no common order of messages: one may be ahead, leave the plan or abandon a step. So the sender numbers the
messages of an edge and *announces* each one, with its size, before it queues it. The receiver queues a receive for each
announcement, in the order of the numbers, whether or not its program has asked for that message yet. Later it finds the
tensor under the number that the header of the message contains::

    sender      announcement 0, send 0 ... announcement 1, send 1 ...           [OutgoingOrder]
    receiver    receive 0 ... receive 1 ...    header with number 1: tensor 1   [IncomingOrder]

Receives cannot wait for the headers. The program may ask for a message only after a later one of the same edge, and
would then wait for itself.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.device_paths.ordered_edge import OrderedEdge
from smp_strategy.distributed.host_copies import Landed
from smp_strategy.distributed.message_tags import ANNOUNCEMENTS, NUM_ANNOUNCEMENTS
from smp_strategy.distributed.pending_messages import send

__all__ = ["AnnouncementWriter", "IncomingOrder", "OutgoingOrder", "read_announcements"]

_END: Final = -1
"""In place of a size: no more messages will come."""
# An idle edge must not time out: gloo would break all connections of the group.
_FOREVER: Final = timedelta(days=1000)


@final
class OutgoingOrder:
    """Sender's end of an edge; ``announce`` tells the receiver the number and the size of a message."""

    def __init__(self, edge: OrderedEdge, announce: Callable[[int, int], None]) -> None:
        self._edge, self._announce = edge, announce
        self._numbers = count()
        self._lock = threading.Lock()

    def send(self, message: Tensor) -> int:
        """Begin to send ``message``; its number on the edge."""
        with self._lock:
            number = next(self._numbers)
            self._announce(number, message.nbytes)
            self._edge.send(message)
            return number


@final
class IncomingOrder:
    """Receiver's end of an edge."""

    def __init__(self, edge: OrderedEdge) -> None:
        self._edge = edge
        self._numbers = count()
        self._landed: dict[int, Landed] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def announced(self, nbytes: int) -> None:
        """Queue the receive of the next message, which has ``nbytes``; called in the order of the numbers."""
        landed = self._edge.receive(nbytes)
        with self._changed:
            self._landed[next(self._numbers)] = landed
            self._changed.notify_all()

    @property
    def is_broken(self) -> bool:
        """Whether an error has been told."""
        return self._error is not None

    def fail(self, error: BaseException) -> None:
        """Let all waits for messages that were not announced raise ``error``."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def take(self, number: int) -> Landed:
        """The message with this number, whose announcement may be a moment behind; called once.

        Raises:
            RuntimeError: the connection to the sender is broken, or a receive has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: number in self._landed or self._error is not None)
            if number in self._landed:
                return self._landed.pop(number)
            assert self._error is not None
            raise RuntimeError(f"connection lost before a message was announced: {self._error}") from self._error


@final
class AnnouncementWriter:
    """Sends announcements by gloo, to the rank ``peer`` in the group."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._under_way: deque[Callable[[], None]] = deque()
        self._next = 0

    def __call__(self, number: int, nbytes: int) -> None:
        tag = ANNOUNCEMENTS + number % NUM_ANNOUNCEMENTS
        self._next = number + 1
        size = torch.tensor([nbytes], dtype=torch.int64, device="cpu")
        self._under_way.append(send(size, self._peer, tag, self._group))

    def wait(self) -> None:
        """Wait until all have arrived, which a thread of the receiver sees to; frees their memory."""
        while self._under_way:
            self._under_way.popleft()()

    def end(self) -> None:
        """Tell the receiver that no more will come."""
        self(self._next, _END)


def read_announcements(
    incoming: IncomingOrder, group: dist.ProcessGroup, peer: int, broken: Callable[[], None]
) -> None:
    """Receive the announcements of an edge from rank ``peer`` of the group until it ends; call ``broken`` when the
    connection or a receive has failed.
    """
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    failed = False
    for number in count():
        try:
            group.recv([size], peer, ANNOUNCEMENTS + number % NUM_ANNOUNCEMENTS).wait(_FOREVER)
        except RuntimeError as error:
            incoming.fail(error)
            broken()
            return
        nbytes = int(size.item())
        if nbytes == _END:
            return
        if failed:
            continue  # to let the sender go on until it learns of the failure
        try:
            incoming.announced(nbytes)
        except Exception as error:
            failed = True
            incoming.fail(error)
            broken()
