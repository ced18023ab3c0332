"""Messages between two ranks, straight out of a buffer and straight into place.

gloo moves the bytes in threads of its own, so messages go on while the caller computes. Each has a tag of its own, so
they may overtake each other; what matters is that all ranks take their tags in the same order.
"""

from collections.abc import Callable, Iterable
from threading import Lock
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.deadlock import BegunCollective, watch_of
from smp_strategy.distributed.failure import raise_lost

__all__ = ["Message", "Messages", "Pending", "wait_for"]

# gloo's tags are 32 bits wide. When they begin anew, what had them before is long over.
_NUM_TAGS = 2**30


@final
class Message:
    """One that is under way."""

    def __init__(self, work: dist.Work, memory: Tensor, rank: int, doing: str) -> None:
        self._work: dist.Work | None = work
        self._memory: Tensor | None = memory  # must live until the message has arrived
        self._rank = rank
        self._doing = doing

    def wait(self) -> None:
        """Until it has arrived; again does nothing."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise_lost(error, self._rank, self._doing)
        self._work = self._memory = None


@final
class Pending:
    """A collective that is under way. Several threads may wait for it.

    Args:
        finish: waits for it.
        meeting: which one it is, for those who wait for it to be watched; ``None``: it is a part of one.
    """

    def __init__(self, finish: Callable[[], object], meeting: BegunCollective | None = None) -> None:
        self._finish: Callable[[], object] | None = finish
        self._meeting = meeting
        self._lock = Lock()

    def wait(self) -> None:
        """Until it is over; again does nothing."""
        with self._lock:
            if self._finish is None:
                return
            if self._meeting is None:
                self._finish()
            else:
                watch_of().until(self._meeting, self._finish)
            self._finish = None


def wait_for(under_way: Iterable[Message | Pending]) -> None:
    """Until all have arrived."""
    for each in under_way:
        each.wait()


@final
class Messages:
    """Sends to and receives from the ranks of ``group``, which are counted within it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._watch = watch_of()
        self._global_ranks = dist.get_process_group_ranks(group)
        self._next_tag = 0

    @property
    def peers(self) -> list[int]:
        """All other ranks, the next one first, so that not all send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def meeting(self, doing: str) -> BegunCollective:
        """A collective that is begun now, as it is watched; all ranks begin the same ones in the same order."""
        return self._watch.begin(self._group, doing)

    def new_tags(self, count: int = 1) -> int:
        """The first of ``count`` consecutive tags."""
        if self._next_tag + count > _NUM_TAGS:
            self._next_tag = 0
        self._next_tag += count
        return self._next_tag - count

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Begin to send ``tensor``, which must not change until it has arrived."""
        # Bytes, because gloo does not know every dtype.
        work = self._group.send([tensor.view(torch.uint8)], peer, tag)
        return Message(work, tensor, self._global_ranks[peer], "sending a part to")

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Begin to receive into ``tensor``."""
        work = self._group.recv([tensor.view(torch.uint8)], peer, tag)
        return Message(work, tensor, self._global_ranks[peer], "waiting for a part from")
