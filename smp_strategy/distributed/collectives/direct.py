"""Direct collectives in one hop: every rank sends to every other, from the source buffer straight into the destination.

A reduction adds in the order of the ranks, like a single process that goes through their microbatches in this order.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from smp_strategy.distributed.collectives.messages import Messages
from smp_strategy.distributed.handle import Handle, wait_for

__all__ = ["OneHop", "add_up", "gather", "reduce"]


class OneHop(Protocol):
    """Gather and reduce in one hop: this module, or another way from rank to rank."""

    def gather(self, messages: Messages, parts: Sequence[Tensor], mine: Tensor, tag: int, /) -> Handle[object]: ...
    def reduce(
        self, messages: Messages, parts: Sequence[Tensor], into: Tensor, tag: int, /, *, is_first: bool, factor: float
    ) -> Handle[object]: ...


def gather(messages: Messages, parts: Sequence[Tensor], mine: Tensor, tag: int) -> Handle[object]:
    """All-gather: fill the ``parts`` of all other ranks."""
    under_way = [messages.receive(parts[peer], peer, tag) for peer in messages.peers]
    under_way += [messages.send(mine, peer, tag) for peer in messages.peers]
    return Handle(lambda: wait_for(under_way))


def reduce(
    messages: Messages, parts: Sequence[Tensor], into: Tensor, tag: int, *, is_first: bool, factor: float = 1
) -> Handle[object]:
    """Reduce-scatter: sum all ranks' values of this rank's part."""
    # The others' values of this rank's part; may be of a narrower dtype than the sum.
    arriving = {peer: torch.empty_like(parts[messages.rank]) for peer in messages.peers}
    receipts = {peer: messages.receive(arriving[peer], peer, tag) for peer in messages.peers}
    sent = [messages.send(parts[peer], peer, tag) for peer in messages.peers]

    def in_order() -> Iterator[Tensor]:
        for rank in range(messages.size):
            if rank == messages.rank:
                yield parts[rank]
            else:
                receipts[rank].wait()
                yield arriving[rank]

    def finish() -> None:
        add_up(into, in_order(), is_first=is_first, factor=factor)
        wait_for(sent)

    return Handle(finish)


def add_up(into: Tensor, summands: Iterable[Tensor], *, is_first: bool, factor: float = 1) -> None:
    """Add ``summands``, times ``factor``, in their order to ``into``, or replace it by their sum (``is_first``)."""
    for summand in summands:
        if not is_first:
            into.add_(summand, alpha=factor)
        elif factor == 1:
            into.copy_(summand)
        else:
            torch.mul(summand, factor, out=into)
        is_first = False
