"""Connections between stages: messages of gloo, the large ones in pieces, each on a connection of its own.

A process group of gloo has one connection (a TCP flow) between two ranks, and one thread that serves it. Networks limit
a single flow: on AWS to 5 Gbit/s, or 10 inside a cluster placement group, where a card has 25 to 100 (`Amazon EC2
instance network bandwidth`_). So stages on several nodes have further groups, and a large message is cut into as many
pieces. Both ends know the size of a message beforehand and cut it in the same places.

.. _Amazon EC2 instance network bandwidth:
   https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth.html
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.handle import Handle

__all__ = ["LEAST_PIECE_BYTES", "Connections"]

LEAST_PIECE_BYTES: Final = 1 << 20
"""Smallest piece. At 5 Gbit/s it takes 1.7 ms, much longer than to begin a message."""


@final
class Connections:
    """Connections from this rank to the other stages.

    Args:
        groups: Process groups of the stages, all with the same ranks in the same order. The first one takes all small
            messages.
    """

    def __init__(
        self, stage_ranks: Sequence[int], groups: Sequence[dist.ProcessGroup], timeout: timedelta | None = None
    ) -> None:
        self._groups = groups
        self._peers = [dist.get_group_rank(groups[0], rank) for rank in stage_ranks]
        self._timeout = timeout or timedelta(0)  # what torch takes for "none given"

    def send(self, message: Tensor, stage: int, tag: int, known_bytes: int) -> Handle[object]:
        """Begin to send ``message``, one-dimensional memory of the host.

        Args:
            message: It stays alive and unchanged until the handle has been waited for.
            tag: Tag, not used by another message to this stage that is under way.
            known_bytes: Bytes of the elements, which both ends know. Strides may follow, as the sender alone knows.
        """
        # As `dist.isend` and `dist.irecv`, without their checks: there are two of them per hop.
        peer, timeout = self._peers[stage], self._timeout
        pieces = self._pieces(message, known_bytes)
        works = [group.send([piece], peer, tag) for group, piece in zip(self._groups, pieces, strict=False)]

        def wait(_: Tensor = message) -> object:  # which must live until then
            return [work.wait(timeout) for work in works]

        return Handle(wait)

    def receive(self, memory: Tensor, stage: int, tag: int, known_bytes: int) -> Handle[object]:
        """Post a receive into ``memory``; otherwise as :meth:`send`."""
        peer, timeout = self._peers[stage], self._timeout
        pieces = self._pieces(memory, known_bytes)
        works = [group.recv([piece], peer, tag) for group, piece in zip(self._groups, pieces, strict=False)]
        return Handle(lambda: [work.wait(timeout) for work in works])

    def number_of_pieces(self, message_bytes: int) -> int:
        """Number of pieces, each on a connection of its own, of a message whose size both ends know."""
        return max(min(len(self._groups), message_bytes // LEAST_PIECE_BYTES), 1)

    def _pieces(self, message: Tensor, known_bytes: int) -> Sequence[Tensor]:
        """Piece of ``message`` for each group that takes one. The first group gets the end, whose size may differ."""
        known_bytes = min(known_bytes, message.nbytes)
        count = self.number_of_pieces(known_bytes)
        if count == 1:
            return [message]
        size, seen = known_bytes // count, message.view(torch.uint8)
        pieces = [seen[number * size : (number + 1) * size] for number in range(count - 1)]
        return [seen[(count - 1) * size :], *pieces]
