"""Hierarchical all-reduces: reduce-scatter and all-gather in two hops each, so that nodes exchange the fewest bytes.

In a ring over all ranks, a buffer of ``S`` bytes crosses the link of each node ``2 (N - 1) / N`` times for ``N`` ranks.
Here it crosses ``2 (n - 1) / n`` times for ``n`` nodes, the least that an all-reduce can do: 1 instead of 1.5 times for
two nodes of two ranks. The buffer is cut into as many equal parts as there are ranks. With ranks ``(node, place)``::

    1   (n, p') -> (n, p)     reduce in the node: the summands of the parts (*, p)
    2   (n, p) -> (n', p)     reduce across nodes: the node's sum of the part (n', p)
    3   (n, p) -> (n', p)     gather across nodes: the sum of the part (n, p)
    4   (n, p) -> (n, p')     gather in the node: the sums of the parts (*, p)

All ranks send the same number of bytes in each hop, so the link of a node is shared equally among its ranks. The hops
are those of :mod:`smp_strategy.distributed.collectives.hierarchical`.

**Several at a time.** A buffer is not cut into chunks, because the hops of several buffers overlap. Hop 2 of one
all-reduce must not wait until hop 3 of the one before is over: the link would be idle. So each hop after the first has
a relay thread of its own, which does that hop of all all-reduces in their order. A hop waits only for earlier hops and
for the same hop of earlier all-reduces, hence some hop can always be done.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from smp_strategy.distributed.collectives.hierarchical import HierarchicalCollectives
from smp_strategy.distributed.collectives.messages import Messages
from smp_strategy.distributed.collectives.relay import Relay
from smp_strategy.distributed.handle import Handle, wait_for

__all__ = ["HierarchicalAllReduces"]


@final
class HierarchicalAllReduces:
    """All-reduces of a group that spans nodes.

    Args:
        messages: Messages between the ranks, which are numbered node by node.
        per_node: Number of ranks per node.
    """

    def __init__(self, messages: Messages, per_node: int) -> None:
        self._rank, self._size = messages.rank, messages.size
        self._sums_of_node, self._sums, self._forwarded = Relay(), Relay(), Relay()
        self._hops = HierarchicalCollectives(messages, per_node, self._forwarded, most_chunks=1)

    def start(self, tensor: Tensor, after: Sequence[Handle[object]]) -> Handle[object]:
        """Sum the ranks' ``tensor`` in place, once everything in ``after`` is over."""
        whole = self._in_equal_parts(tensor, after)
        parts = whole.chunk(self._size) if whole.numel() else (whole,) * self._size
        mine = torch.empty_like(parts[self._rank])
        of_reduction, of_gather = self._hops.new_tags_for(mine), self._hops.new_tags_for(mine)

        def begin_reduce() -> Callable[[], None]:
            wait_for(after)
            pass_on, finish = self._hops.begin_reduce(parts, mine, of_reduction, is_first=True)
            pass_on()
            return finish

        def begin_gather() -> tuple[Callable[[], None], Callable[[], None]]:
            summed_in_node.wait()()
            parts[self._rank].copy_(mine)
            return self._hops.begin_gather(parts, mine, of_gather)

        def forward() -> Callable[[], None]:
            pass_on, finish = summed.wait()
            pass_on()
            return finish

        summed_in_node = self._sums_of_node.submit(begin_reduce)
        summed = self._sums.submit(begin_gather)
        forwarded = self._forwarded.submit(forward)

        def finish() -> None:
            forwarded.wait()()
            if whole is not tensor:
                tensor.copy_(whole[: tensor.numel()])

        return Handle(finish)

    def close(self) -> None:
        """End the threads."""
        for relay in (self._sums_of_node, self._sums, self._forwarded):
            relay.close()

    def _in_equal_parts(self, tensor: Tensor, after: Sequence[Handle[object]]) -> Tensor:
        """``tensor`` itself, or a copy with zeros behind it if its elements cannot be dealt out equally."""
        lacking = -tensor.numel() % self._size
        if not lacking:
            return tensor
        wait_for(after)
        return torch.cat([tensor, tensor.new_zeros(lacking)])
