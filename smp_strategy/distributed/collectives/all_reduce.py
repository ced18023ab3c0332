"""Asynchronous all-reduces over messages, several at a time, driven by a background thread.

An all-reduce begins when its summand is ready, and adds when the other ranks' parts have arrived; with more than two
ranks each sums a part of the elements and sends the result to the others. Left to the code that wants the sum, which
computes something else meanwhile, these steps would leave the link idle. So the relay thread does them
(:mod:`smp_strategy.distributed.collectives.relay`), one step of each all-reduce at a time; a step ends when messages
are sent::

    first    wait for the summand    send
    second                           send        wait, add     send
    third                                        send          wait, add    ...

One travels while another is added, and only a few need memory at a time. A step of an all-reduce waits only for steps
of the same and of earlier ones, and all ranks start them in the same order, so some step can always be done.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from smp_strategy.distributed.collectives import direct
from smp_strategy.distributed.collectives.messages import Messages
from smp_strategy.distributed.collectives.relay import Relay
from smp_strategy.distributed.handle import Handle, wait_for

__all__ = ["AllReduces"]


@final
class AllReduces:
    """All-reduces of a group, which a relay thread drives.

    Args:
        messages: Messages between the ranks.
        relay: Thread that does the steps.
    """

    def __init__(self, messages: Messages, relay: Relay) -> None:
        self._messages = messages
        self._relay = relay
        self._running: list[_Steps] = []

    def start(self, tensor: Tensor, after: Sequence[Handle[object]]) -> Handle[object]:
        """Sum the ranks' ``tensor`` in place, once everything in ``after`` is over."""
        tag = self._messages.new_tags(2)
        steps = self._exchange(tensor, after, tag) if self._messages.size <= 2 else self._in_parts(tensor, after, tag)
        done: Future[None] = Future()
        self._relay.submit(partial(self._begin, _Steps(steps, done)))

        def finish() -> None:
            if not done.done():
                self._relay.submit(self._finish_all)
            done.result()

        return Handle(finish)

    def _begin(self, new: "_Steps") -> None:
        is_running = new.advance()
        self._advance()
        if is_running:
            self._running.append(new)

    def _advance(self) -> None:
        self._running = [each for each in self._running if each.advance()]

    def _finish_all(self) -> None:
        while self._running:
            self._advance()

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


class _Steps(NamedTuple):
    """An all-reduce under way: its steps, and a future that is set after the last one."""

    steps: Iterator[None]
    done: Future[None]

    def advance(self) -> bool:
        """Do the next step; whether there may be another one."""
        try:
            next(self.steps)
        except StopIteration:
            self.done.set_result(None)
        except BaseException as error:
            self.done.set_exception(error)
        else:
            return True
        return False
