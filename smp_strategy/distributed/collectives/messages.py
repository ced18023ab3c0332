"""Messages between two ranks, straight out of a buffer and straight into place.

gloo moves the bytes in threads of its own, so messages travel while the caller computes. Each has a tag of its own, so
they may overtake each other; all ranks must take their tags in the same order.
"""

from collections.abc import Callable
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import pending_messages
from smp_strategy.distributed.deadlock import BegunCollective, watch_of
from smp_strategy.distributed.failure import current_run, raise_lost
from smp_strategy.distributed.handle import Handle
from smp_strategy.distributed.message_tags import NUM_FLAT_BUFFERS

__all__ = ["Messages"]

_RUNS: Final = 1 << 10
"""Number of runs after which tags are those of an earlier run."""


@final
class Messages:
    """Sends to and receives from the ranks of ``group``, by their ranks within it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._watch = watch_of()
        self._global_ranks = dist.get_process_group_ranks(group)
        # A run that has failed may have left messages behind, whose tags must not be taken again.
        self._next_tag = current_run() % _RUNS * (NUM_FLAT_BUFFERS // _RUNS)

    @property
    def peers(self) -> list[int]:
        """All other ranks, the next one first, so that not all send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def meeting(self, doing: str) -> BegunCollective:
        """Register a collective that begins now with the deadlock watch; all ranks do so in the same order."""
        return self._watch.begin(self._group, doing)

    def new_tags(self, count: int = 1) -> int:
        """First of ``count`` consecutive tags."""
        if self._next_tag + count > NUM_FLAT_BUFFERS:
            self._next_tag = 0
        self._next_tag += count
        return self._next_tag - count

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle[None]:
        """Begin to send ``tensor``, which must not change until it has arrived."""
        # Bytes, because gloo does not know every dtype.
        wait = pending_messages.send(tensor.view(torch.uint8), peer, tag, self._group)
        return self._message(wait, peer, "sending a part to")

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Handle[None]:
        """Begin to receive into ``tensor``."""
        wait = pending_messages.receive(tensor.view(torch.uint8), peer, tag, self._group)
        return self._message(wait, peer, "waiting for a part from")

    def _message(self, wait: Callable[[], None], peer: int, doing: str) -> Handle[None]:
        rank = self._global_ranks[peer]

        def finish() -> None:
            try:
                wait()
            except RuntimeError as error:
                raise_lost(error, rank, doing)

        return Handle(finish)
