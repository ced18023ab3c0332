"""Collectives of flat buffers for gloo, made of point-to-point messages.

gloo's own collectives copy whole buffers on the way in and out, and its reduce-scatter sends as much as an all-reduce,
three times the necessary bytes. Messages go from the source buffer straight into the destination, and all additions are
done here, in a defined order.

**Order of additions.** The previous value comes first, then the ranks in their order: with 4 ranks
``(((old + g0) + g1) + g2) + g3``. If a group spans nodes, the sums of the nodes in the order of the nodes:
``(old + (g0 + g1)) + (g2 + g3)``. An all-reduce has no previous value. The order is the same in every run, for every
dtype and every number of chunks.

**Memory.** Summands arrive beside the buffer that they are added to: about as many elements as it has. If that is too
much, a buffer is reduced in slices, one after the other, in the background.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.background_wait import Relay
from smp_strategy.distributed.collectives import direct
from smp_strategy.distributed.collectives.hierarchical import LEAST_CHUNK_BYTES, HierarchicalCollectives, Tags
from smp_strategy.distributed.collectives.interleaved import Interleaved
from smp_strategy.distributed.collectives.messages import Messages
from smp_strategy.distributed.collectives.shared_memory_hop import SharedMemoryHop
from smp_strategy.distributed.deadlock import BegunCollective
from smp_strategy.distributed.handle import Handle, wait_for

__all__ = ["HierarchicalAllReduces", "AllReduces", "GlooCollectives"]


# --- between nodes ---------------------------------------------------------------------------------------------------
# Hierarchical all-reduces: reduce-scatter and all-gather in two hops each, so that nodes exchange the fewest bytes.
#
# In a ring over all ranks, a buffer of `S` bytes crosses the link of each node `2 (N - 1) / N` times for `N` ranks.
# Here it crosses `2 (n - 1) / n` times for `n` nodes, the least that an all-reduce can do: 1 instead of 1.5 times for
# two nodes of two ranks. The buffer is cut into as many equal parts as there are ranks. With ranks `(node, place)`::
#
#     1   (n, p') -> (n, p)     reduce in the node: the summands of the parts (*, p)
#     2   (n, p) -> (n', p)     reduce across nodes: the node's sum of the part (n', p)
#     3   (n, p) -> (n', p)     gather across nodes: the sum of the part (n, p)
#     4   (n, p) -> (n, p')     gather in the node: the sums of the parts (*, p)
#
# All ranks send the same number of bytes in each hop, so the link of a node is shared equally among its ranks. The hops
# are those of `smp_strategy.distributed.collectives.hierarchical`.
#
# **Several at a time.** A buffer is not cut into chunks, because the hops of several buffers overlap. Hop 2 of one
# all-reduce must not wait until hop 3 of the one before is over: the link would be idle. So each hop after the first
# has a relay thread of its own, which does that hop of all all-reduces in their order. A hop waits only for earlier
# hops and for the same hop of earlier all-reduces, hence some hop can always be done. (One thread for all of them
# could wait for a hop that another rank does after one for which that rank waits for this one.)


@final
class HierarchicalAllReduces:
    """All-reduces of a group that spans nodes.

    Args:
        messages: Messages between the ranks, which are numbered node by node.
        per_node: Number of ranks per node.
    """

    def __init__(self, messages: Messages, per_node: int) -> None:
        self._rank, self._size = messages.rank, messages.size
        self._relays = Relay(), Relay(), Relay()
        self._hops = HierarchicalCollectives(messages, per_node, self._relays[-1], most_chunks=1)

    def start(self, tensor: Tensor, after: Sequence[Handle[object]]) -> Handle[object]:
        """Sum the ranks' ``tensor`` in place, once everything in ``after`` is over."""
        # All ranks take their tags in the order of these calls.
        steps = self._steps(tensor, after, self._hops.new_tags_for(tensor), self._hops.new_tags_for(tensor))
        done: Handle[object] = Handle(lambda: None)
        for relay in self._relays:
            done = relay.submit(partial(_next_after, done, steps))
        return done.then(lambda _: next(steps, None))

    def close(self) -> None:
        """End the threads."""
        for relay in self._relays:
            relay.close()

    def _steps(self, tensor: Tensor, after: Sequence[Handle[object]], down: Tags, up: Tags) -> Iterator[None]:
        wait_for(after)
        lacking = -tensor.numel() % self._size
        # Equal parts, if need be of a copy with zeros at its end.
        whole = torch.cat([tensor, tensor.new_zeros(lacking)]) if lacking else tensor
        parts = whole.chunk(self._size) if whole.numel() else (whole,) * self._size
        mine = torch.empty_like(parts[self._rank])
        reduction = self._hops.reduce_steps(parts, mine, down, is_first=True)
        next(reduction)
        next(reduction)
        yield
        next(reduction, None)
        parts[self._rank].copy_(mine)
        gathering = self._hops.gather_steps(parts, mine, up)
        next(gathering)
        yield
        next(gathering)
        yield
        next(gathering, None)
        if lacking:
            tensor.copy_(whole[: tensor.numel()])


def _next_after(before: Handle[object], steps: Iterator[None]) -> None:
    before.wait()
    next(steps)


# --- all-reduce ------------------------------------------------------------------------------------------------------
# Asynchronous all-reduces over messages.
#
# An all-reduce begins when its summand is ready, and adds when the other ranks' parts have arrived; with more than two
# ranks each sums a part of the elements and sends the result to the others.


@final
class AllReduces:
    """All-reduces of a group.

    Args:
        messages: Messages between the ranks.
        relay: Thread that does their steps.
    """

    def __init__(self, messages: Messages, relay: Relay) -> None:
        self._messages = messages
        self._running = Interleaved(relay)

    def start(self, tensor: Tensor, after: Sequence[Handle[object]]) -> Handle[object]:
        """Sum the ranks' ``tensor`` in place, once everything in ``after`` is over."""
        tag = self._messages.new_tags(2)
        is_pair = self._messages.size <= 2
        return self._running.start(
            self._exchange(tensor, after, tag) if is_pair else self._in_parts(tensor, after, tag)
        )

    def _exchange(self, tensor: Tensor, after: Sequence[Handle[object]], tag: int) -> Iterator[None]:
        """For two ranks: the same bytes as in parts, one hop earlier. Two summands have no order."""
        messages = self._messages
        others = [torch.empty_like(tensor) for _ in messages.peers]
        under_way = [messages.receive(other, peer, tag) for other, peer in zip(others, messages.peers, strict=True)]
        wait_for(after)
        under_way += [messages.send(tensor, peer, tag) for peer in messages.peers]
        yield
        wait_for(under_way)
        direct.add_up(tensor, others, is_first=False)

    def _in_parts(self, tensor: Tensor, after: Sequence[Handle[object]], tag: int) -> Iterator[None]:
        messages = self._messages
        parts = tensor.tensor_split(messages.size)
        mine = torch.empty_like(parts[messages.rank])
        wait_for(after)
        reduced = direct.reduce(messages, parts, mine, tag, is_first=True)
        yield
        reduced.wait()
        parts[messages.rank].copy_(mine)
        passed_on = direct.gather(messages, parts, mine, tag + 1)
        yield
        passed_on.wait()

    def close(self) -> None:
        """Leave the thread to its owner."""


# --- gloo ------------------------------------------------------------------------------------------------------------


@final
class GlooCollectives:
    """:class:`~smp_strategy.distributed.collectives.interface.Collectives` over messages.

    Args:
        group: Ranks, node by node.
        per_node: Number of ranks on each node; ``None``: all are on one.
        gathers_in_hops: Whether gathers, like reductions and all-reduces, go between nodes and then inside them.
        most_reduced: Buffers with more elements are reduced in slices; ``None``: none are.
        least_chunk_bytes: Smallest chunks into which a shard is cut for two hops.
        shared: Hop through shared memory, if all ranks are on one node; ``None``: all parts are messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        per_node: int | None = None,
        *,
        gathers_in_hops: bool = True,
        most_reduced: int | None = None,
        least_chunk_bytes: int = LEAST_CHUNK_BYTES,
        shared: SharedMemoryHop | None = None,
    ) -> None:
        self._shared = shared
        self._hop: direct.OneHop = direct if shared is None else shared
        self._gathers_in_hops = gathers_in_hops
        self._most_reduced = most_reduced
        self._messages = Messages(group)
        self.rank, self.size = self._messages.rank, self._messages.size
        self._relay = Relay()
        self._all_reduces: AllReduces | HierarchicalAllReduces = AllReduces(self._messages, self._relay)
        self._two_hops = None
        if per_node is not None and 1 < per_node < self.size:
            assert self.size % per_node == 0, "all nodes have equally many ranks of a shard group"
            self._two_hops = HierarchicalCollectives(
                self._messages, per_node, self._relay, least_chunk_bytes=least_chunk_bytes
            )
            self._all_reduces = HierarchicalAllReduces(self._messages, per_node)

    def gather(self, full: Tensor, shard: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        """See :meth:`Collectives.gather`."""
        parts, meeting = full.chunk(self.size), self._messages.meeting("parts of weights")
        if self._two_hops is not None and self._gathers_in_hops:
            wait_for(after)
            gathered = self._two_hops.gather(parts, shard)
            _copy(parts[self.rank], shard)
            return meeting.work(gathered.wait)
        tag = self._messages.new_tags()

        def start() -> Handle[object]:
            started = self._hop.gather(self._messages, parts, shard, tag)
            _copy(parts[self.rank], shard)
            return started

        return self._start(start, after, meeting)

    def reduce(
        self, full: Tensor, into: Tensor, after: Sequence[Handle[object]] = (), *, is_first: bool, factor: float = 1
    ) -> Handle[object]:
        """See :meth:`Collectives.reduce`."""
        parts, runs = full.chunk(self.size), self._runs(into)
        meeting = self._messages.meeting("parts of gradients")
        if self._two_hops is not None:
            wait_for(after)
            if len(runs) > 1:
                in_turns = self._two_hops.reduce_in_turn(parts, into, runs, is_first=is_first, factor=factor)
                return meeting.work(in_turns.wait)
            return meeting.work(self._two_hops.reduce(parts, into, is_first=is_first, factor=factor).wait)
        tag = self._messages.new_tags(len(runs))
        reduce = partial(self._hop.reduce, self._messages, is_first=is_first, factor=factor)
        if len(runs) == 1:
            return self._start(lambda: reduce(parts, into, tag), after, meeting)

        def in_turn() -> None:
            wait_for(after)
            for number, run in enumerate(runs):
                reduce([part[run] for part in parts], into[run], tag + number).wait()

        return meeting.work(self._relay.submit(in_turn).wait)

    def all_reduce(self, tensor: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        """See :meth:`Collectives.all_reduce`."""
        meeting = self._messages.meeting("sums of gradients")
        return meeting.work(self._all_reduces.start(tensor, after).wait)

    def close(self) -> None:
        """See :meth:`Collectives.close`."""
        self._relay.close()
        if self._shared is not None:
            self._shared.close()
        self._all_reduces.close()

    def _start(
        self, start: Callable[[], Handle[object]], after: Sequence[Handle[object]], meeting: BegunCollective
    ) -> Handle[object]:
        """Start a collective, in the background if it has to wait for something."""
        if not after:
            return meeting.work(start().wait)

        def start_later() -> Handle[object]:
            wait_for(after)
            return start()

        started = self._relay.submit(start_later)
        return meeting.work(lambda: started.wait().wait())

    def _runs(self, shard: Tensor) -> list[slice]:
        """Cut a shard into as many runs as its buffer has slices."""
        most = max(1, (self._most_reduced or shard.numel() * self.size) // self.size)
        edges = [*range(0, max(1, shard.numel()), most), shard.numel()]
        return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def _copy(into: Tensor, shard: Tensor) -> None:
    if into.data_ptr() != shard.data_ptr():
        into.copy_(shard)
