"""Asynchronous all-reduces over messages.

An all-reduce begins when its summand is ready, and adds when the other ranks' parts have arrived; with more than two
ranks each sums a part of the elements and sends the result to the others.
"""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from smp_strategy.distributed.collectives import direct
from smp_strategy.distributed.collectives.interleaved import Interleaved
from smp_strategy.distributed.collectives.messages import Messages
from smp_strategy.distributed.collectives.relay import Relay
from smp_strategy.distributed.handle import Handle, wait_for

__all__ = ["AllReduces"]


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
