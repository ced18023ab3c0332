"""Pending messages: gloo's sends and receives, kept alive with their memory until they are over.

[Note: abandoned messages] If the memory of a receive is freed before its message comes, gloo's connection stops without
a word: it reads neither this message nor any later one, whatever their tags. A step that raises abandons the messages
that it has begun, and the script may train again over the same connections. So a group keeps the messages that nobody
has waited for, as long as it lives itself.
"""

from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

__all__ = ["receive", "send"]

_PENDING: "Final[WeakKeyDictionary[dist.ProcessGroup, set[tuple[dist.Work, Tensor]]]]" = WeakKeyDictionary()


def send(tensor: Tensor, rank: int, tag: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Begin to send ``tensor`` to ``rank`` of ``group``; the function that is returned waits until it has arrived."""
    return _kept(group.send([tensor], rank, tag), tensor, group)


def receive(tensor: Tensor, rank: int, tag: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Begin to receive into ``tensor`` from ``rank`` of ``group``; the function that is returned waits for it."""
    return _kept(group.recv([tensor], rank, tag), tensor, group)


def _kept(work: dist.Work, memory: Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
    pending, message = _PENDING.setdefault(group, set()), (work, memory)
    pending.add(message)

    def wait() -> None:
        work.wait()
        pending.discard(message)

    return wait
