"""Gather and reduce in one hop through shared memory, between the ranks of one node.

A rank copies what others need into a block of its arena (:mod:`smp_strategy.distributed.shared_arena`), once, and says
where it is. A gather copies it out in the background; a reduction adds it where it is. Through a socket, every rank
would copy it for each other, and the kernel once more. Values and the order of additions are those of
:mod:`smp_strategy.distributed.collectives.direct`, which small parts take.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.background_wait import Relay
from smp_strategy.distributed.collectives import direct
from smp_strategy.distributed.collectives.messages import Messages
from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.distributed.shared_arena import Arena, PeerArena, tensor_in

__all__ = ["SharedMemoryHop"]

LEAST_BYTES: Final = 1 << 18
"""Size of a part from which it is in shared memory."""


@final
class SharedMemoryHop:
    """Hop between ranks that all share memory."""

    def __init__(
        self, group: dist.ProcessGroup, own: Arena, theirs: Mapping[int, PeerArena], least_bytes: int = LEAST_BYTES
    ) -> None:
        self._rank, self._own = dist.get_rank(group), own
        ranks = dist.get_process_group_ranks(group)
        self._arenas = {place: theirs[rank] for place, rank in enumerate(ranks) if place != self._rank}
        self._least_bytes = least_bytes
        self._relay = Relay()

    def gather(self, messages: Messages, parts: Sequence[Tensor], mine: Tensor, tag: int) -> Handle[object]:
        """As :func:`direct.gather`."""
        if mine.nbytes < self._least_bytes:
            return direct.gather(messages, parts, mine, tag)
        start = self._own.allocate(mine.nbytes, readers=len(self._arenas))
        self._own.view(start, mine.nbytes).copy_(mine.view(torch.uint8))
        places = _Places(messages, dict.fromkeys(messages.peers, start), tag)

        def copy_out() -> None:
            for peer in messages.peers:
                parts[peer].copy_(self._received(peer, places.of(peer), mine))
            places.finish()

        return self._relay.submit(copy_out)

    def reduce(
        self, messages: Messages, parts: Sequence[Tensor], into: Tensor, tag: int, *, is_first: bool, factor: float = 1
    ) -> Handle[object]:
        """As :func:`direct.reduce`."""
        mine = parts[self._rank]
        if mine.nbytes < self._least_bytes:
            return direct.reduce(messages, parts, into, tag, is_first=is_first, factor=factor)
        starts = {}
        for peer in messages.peers:
            starts[peer] = self._own.allocate(mine.nbytes)
            self._own.view(starts[peer], mine.nbytes).copy_(parts[peer].view(torch.uint8))
        places = _Places(messages, starts, tag)

        def in_order() -> Iterator[Tensor]:
            for rank, part in enumerate(parts):
                yield part if rank == self._rank else self._received(rank, places.of(rank), mine, reader=0)

        def finish() -> None:
            direct.add_up(into, in_order(), is_first=is_first, factor=factor)
            places.finish()

        return Handle(finish)

    def close(self) -> None:
        """End the background thread, and free all memory."""
        self._relay.close()
        self._own.close()

    def _received(self, peer: int, start: int, like: Tensor, reader: int | None = None) -> Tensor:
        # Of a block for all peers, this rank's number among them is that of the reader.
        place = self._rank - (self._rank > peer) if reader is None else reader
        return tensor_in(self._arenas[peer].take(start, like.nbytes, place), like.dtype)


@final
class _Places:
    """Exchange of the places of blocks."""

    def __init__(self, messages: Messages, starts: Mapping[int, int], tag: int) -> None:
        self._found = {peer: torch.zeros(1, dtype=torch.int64, device="cpu") for peer in starts}
        self._receipts = {peer: messages.receive(found, peer, tag) for peer, found in self._found.items()}
        told = [torch.tensor([start], dtype=torch.int64, device="cpu") for start in starts.values()]
        self._sent = [messages.send(each, peer, tag) for each, peer in zip(told, starts, strict=True)]

    def of(self, peer: int) -> int:
        """Start of the block of ``peer``."""
        self._receipts[peer].wait()
        return int(self._found[peer])

    def finish(self) -> None:
        """Wait until all peers have been told."""
        wait_for(self._sent)
