"""Hierarchical collectives in two hops: each byte crosses the slow link between nodes once per node.

Directly, an element would cross the link to another node once for every rank there. Here it crosses between *twins*,
the ranks with the same place on their nodes, and is copied or summed among *neighbours*, the ranks of a node. With
ranks ``(node, place)``::

    gather    (n, p) -> (n', p)     its shard
              (n', p) -> (n', p')   the shard is forwarded

    reduce    (n, p') -> (n, p)     the summands that the ranks (*, p) need; (n, p) sums over p'
              (n, p) -> (n', p)     the node's sum, for the twin whose shard it is, which sums over the nodes

Shards are cut into chunks, so that both hops overlap: of the fast hop only that of the last chunk adds time. The relay
thread forwards (:mod:`smp_strategy.distributed.background_wait`). A message's tag follows from the node that it is
about and the chunk.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from smp_strategy.distributed.background_wait import Relay
from smp_strategy.distributed.collectives.direct import add_up
from smp_strategy.distributed.collectives.messages import Messages
from smp_strategy.distributed.handle import Handle, wait_for

__all__ = ["HierarchicalCollectives", "Tags"]

# Chunks of a shard. More chunks hide more of the fast hop; fewer chunks need fewer messages.
MOST_CHUNKS = 4
LEAST_CHUNK_BYTES = 2**18

Tags = Callable[[int, int], int]
"""Tag of a message, by the node and the chunk that it is about."""


@final
class HierarchicalCollectives:
    """Gather and reduce in two hops.

    Args:
        messages: Messages between the ranks, which are numbered node by node.
        per_node: Number of ranks per node.
        relay: Thread that forwards.
        least_chunk_bytes: Size of the smallest chunks of a shard.
        most_chunks: Most chunks of a shard.
    """

    def __init__(
        self,
        messages: Messages,
        per_node: int,
        relay: Relay,
        *,
        least_chunk_bytes: int = LEAST_CHUNK_BYTES,
        most_chunks: int = MOST_CHUNKS,
    ) -> None:
        self._messages = messages
        self._relay = relay
        self._least_chunk_bytes = least_chunk_bytes
        self._most_chunks = most_chunks
        self._per_node = per_node
        self._num_nodes = messages.size // per_node
        self._node, self._place = divmod(messages.rank, per_node)

    def gather(self, parts: Sequence[Tensor], mine: Tensor) -> Handle[object]:
        """All-gather: fill the ``parts`` of all other ranks."""
        return self._forwarded(self.gather_steps(parts, mine, self.new_tags_for(mine)))

    def reduce(self, parts: Sequence[Tensor], into: Tensor, *, is_first: bool, factor: float = 1) -> Handle[object]:
        """Reduce-scatter: sum all ranks' values of this rank's part; ``parts`` are overwritten."""
        tags = self.new_tags_for(into)
        return self._forwarded(self.reduce_steps(parts, into, tags, is_first=is_first, factor=factor))

    def reduce_in_turn(
        self, parts: Sequence[Tensor], into: Tensor, runs: Sequence[slice], *, is_first: bool, factor: float = 1
    ) -> Handle[object]:
        """Reduce-scatter one run of elements after the other, to bound the memory."""
        tags = [self.new_tags_for(into[run]) for run in runs]

        def work() -> None:
            for run, tag in zip(runs, tags, strict=True):
                of_run = [part[run] for part in parts]
                for _ in self.reduce_steps(of_run, into[run], tag, is_first=is_first, factor=factor):
                    pass

        return self._relay.submit(work)

    def _forwarded(self, steps: Iterator[None]) -> Handle[object]:
        """The first step now, the second in the relay thread, the last one for who waits."""
        next(steps)
        return self._relay.submit(partial(next, steps)).then(lambda _: next(steps, None))

    def gather_steps(self, parts: Sequence[Tensor], mine: Tensor, tag: Tags) -> Iterator[None]:
        """Steps of a gather: send; forward the shards that come from other nodes; wait.

        Args:
            parts: Parts of all ranks; those of the others are filled.
            mine: Part of this rank.
            tag: Tags from :meth:`new_tags_for`.
        """
        messages, chunks = self._messages, self._chunks(mine)
        from_twins: list[tuple[int, int, Handle[None]]] = []
        under_way: list[Handle[None]] = []
        for number, chunk in enumerate(chunks):
            for node in self._other_nodes:
                twin = self._rank(node, self._place)
                from_twins.append((node, number, messages.receive(parts[twin][chunk], twin, tag(node, number))))
                under_way.append(messages.send(mine[chunk], twin, tag(self._node, number)))
        for place in self._other_places:
            neighbour = self._rank(self._node, place)
            under_way.append(messages.receive(parts[neighbour], neighbour, tag(self._node, 0)))
            under_way.append(messages.send(mine, neighbour, tag(self._node, 0)))
            for node, number, _ in from_twins:
                part = parts[self._rank(node, place)][chunks[number]]
                under_way.append(messages.receive(part, neighbour, tag(node, number)))
        yield
        for node, number, message in from_twins:
            message.wait()
            part = parts[self._rank(node, self._place)][chunks[number]]
            for place in self._other_places:
                under_way.append(messages.send(part, self._rank(self._node, place), tag(node, number)))
        yield
        wait_for(under_way)

    def reduce_steps(
        self, parts: Sequence[Tensor], into: Tensor, tag: Tags, *, is_first: bool, factor: float = 1
    ) -> Iterator[None]:
        """Steps of a reduction: send to the neighbours; sum for the twins and send; add the sums.

        Args:
            parts: Equally many elements for each rank, in their order; overwritten.
            into: Gets the sum of this rank's part.
            tag: Tags from :meth:`new_tags_for`.
            is_first: Whether the sum replaces the content of ``into`` instead of being added to it.
            factor: Factor of the ranks' values.
        """
        messages, chunks = self._messages, self._chunks(into)
        # By place: values of this rank and its neighbours for the shards of this rank and its twins.
        like = parts[messages.rank]  # may be of a narrower dtype than the sum
        found = [[torch.empty_like(like) for _ in range(self._num_nodes)] for _ in self._other_places]
        found.insert(self._place, [parts[self._rank(node, self._place)] for node in range(self._num_nodes)])
        # By node. The first place's memory also takes the sum.
        sums = [found[0][node] if node == self._node else torch.empty_like(like) for node in range(self._num_nodes)]
        from_neighbours: dict[tuple[int, int], list[Handle[None]]] = {}
        under_way: list[Handle[None]] = []
        for number, chunk in enumerate(chunks):
            for node in [*self._other_nodes, self._node]:  # the long way first
                receipts = from_neighbours[node, number] = []
                for place in self._other_places:
                    neighbour = self._rank(self._node, place)
                    receipts.append(messages.receive(found[place][node][chunk], neighbour, tag(node, number)))
                    part = parts[self._rank(node, place)][chunk]
                    under_way.append(messages.send(part, neighbour, tag(node, number)))
            for node in self._other_nodes:
                under_way.append(messages.receive(sums[node][chunk], self._rank(node, self._place), tag(node, number)))
        yield
        for (node, number), receipts in from_neighbours.items():
            wait_for(receipts)
            first, *others = (of_place[node][chunks[number]] for of_place in found)
            add_up(first, others, is_first=False)
            if node != self._node:
                under_way.append(messages.send(first, self._rank(node, self._place), tag(self._node, number)))
        yield
        wait_for(under_way)
        add_up(into, sums, is_first=is_first, factor=factor)

    def new_tags_for(self, shard: Tensor) -> Tags:
        """Tags of one gather or reduction of shards like ``shard``; all ranks take theirs in the same order."""
        num_chunks = len(self._chunks(shard))
        first = self._messages.new_tags(self._num_nodes * num_chunks)
        return lambda node, number: first + node * num_chunks + number

    @property
    def _other_nodes(self) -> list[int]:
        return [(self._node + step) % self._num_nodes for step in range(1, self._num_nodes)]

    @property
    def _other_places(self) -> list[int]:
        return [place for place in range(self._per_node) if place != self._place]

    def _rank(self, node: int, place: int) -> int:
        return node * self._per_node + place

    def _chunks(self, shard: Tensor) -> list[slice]:
        count = min(max(shard.nbytes // self._least_chunk_bytes, 1), self._most_chunks)
        edges = [shard.numel() * number // count for number in range(count + 1)]
        return [slice(start, stop) for start, stop in itertools.pairwise(edges)]
