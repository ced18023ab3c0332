"""Sums through shared memory of the ranks of one node: nothing is sent but where the summands are.

Each rank joins its summands in a block of its arena (:mod:`smp_strategy.distributed.shared_arena`). The block of the
first rank becomes the sum: each rank adds its part of the elements there, in the order of the ranks, and all read the
sum in place. So an all-reduce of ``S`` bytes among ``N`` ranks is one addition of ``S (N - 1)`` bytes, shared by all,
where gloo's sockets would copy ``4 S (N - 1)`` bytes besides. With ranks ``r``::

    r            join the summands in a block, say where it is
    r            when all have said so: add part r of the others' blocks, say that it is done
    r            when all have said so: the sum

The messages are gloo's, so that the death of a rank is noticed as elsewhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.background_wait import Relay
from smp_strategy.distributed.collectives.direct import add_up
from smp_strategy.distributed.collectives.interleaved import Interleaved
from smp_strategy.distributed.collectives.messages import Messages
from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.distributed.shared_arena import Arena, PeerArena, tensor_in

__all__ = ["SharedMemorySums"]

_SUMS: Final = "sums of gradients"
LEAST_BYTES: Final = 1 << 16
"""Size from which a sum is in shared memory. Smaller ones are all-reduces of the backend."""


@final
class SharedMemorySums:
    """:class:`~smp_strategy.distributed.collectives.interface.JoinedSums` of ranks that all share memory."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        own: Arena,
        theirs: Mapping[int, PeerArena],
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        self._group = group
        self._own = own
        ranks = dist.get_process_group_ranks(group)
        self._arenas: list[Arena | PeerArena] = [theirs.get(rank, own) for rank in ranks]
        self._least_bytes = least_bytes
        self._messages = Messages(group)
        self._relay = Relay()
        self._running = Interleaved(self._relay)

    def add(self, tensors: Sequence[Tensor], *, dtype: torch.dtype) -> Handle[Tensor]:
        """See :meth:`JoinedSums.add`."""
        pieces = [tensor.detach().reshape(-1) for tensor in tensors]
        numel = sum(len(piece) for piece in pieces)
        if numel * dtype.itemsize < self._least_bytes:
            sent = torch.cat(pieces).to(dtype)
            return collectives.all_reduce(sent, group=self._group, doing=_SUMS).then(lambda _: sent)
        start, mine = self._block(numel, dtype)
        torch.cat(pieces, out=mine)
        meeting, found = self._messages.meeting(_SUMS), list[Tensor]()
        done = self._running.start(self._sum(mine, start, self._messages.new_tags(2), found))
        return meeting.work(done.wait).then(lambda _: found.pop())

    def flush(self) -> None:
        """See :meth:`JoinedSums.flush`: they have begun already, so only a step ends."""
        self._own.trim()

    def close(self) -> None:
        """End the background thread, and free all memory that no sum is in."""
        self._relay.close()
        self._own.close()

    def _block(self, numel: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        """Start of a new block for ``numel`` elements, and the tensor in it."""
        nbytes = numel * dtype.itemsize
        # All ranks read the sum. Where it is not, the owner keeps its summand until all are done with it.
        start = self._own.allocate(nbytes, readers=self._messages.size if self._messages.rank == 0 else 1)
        return start, tensor_in(self._own.take(start, nbytes), dtype)

    def _sum(self, mine: Tensor, start: int, tag: int, found: list[Tensor]) -> Iterator[None]:
        """Steps of a sum, which is put into ``found``."""
        messages, rank = self._messages, self._messages.rank
        place = torch.tensor([start], dtype=torch.int64, device="cpu")
        places = [place if other == rank else torch.empty_like(place) for other in range(messages.size)]
        under_way = [messages.receive(places[peer], peer, tag) for peer in messages.peers]
        under_way += [messages.send(place, peer, tag) for peer in messages.peers]
        yield
        wait_for(under_way)
        starts = [int(each) for each in places]
        first = self._arenas[0]
        total = mine if first is self._own else tensor_in(first.take(starts[0], mine.nbytes, rank), mine.dtype)
        part = slice(len(mine) * rank // messages.size, len(mine) * (rank + 1) // messages.size)
        add_up(
            total[part], (self._summand(other, starts, mine)[part] for other in range(1, len(starts))), is_first=False
        )
        under_way = [messages.receive(torch.empty_like(place), peer, tag + 1) for peer in messages.peers]
        under_way += [messages.send(place, peer, tag + 1) for peer in messages.peers]
        yield
        wait_for(under_way)
        found.append(total)

    def _summand(self, rank: int, starts: Sequence[int], mine: Tensor) -> Tensor:
        """Summand of ``rank``, like ``mine``. It stays there until this rank says that it is done."""
        arena = self._arenas[rank]
        if isinstance(arena, Arena):
            return mine
        return tensor_in(arena.peek(starts[rank], mine.nbytes), mine.dtype)
