"""All-reduces that go on in the background, several at a time.

An all-reduce begins when what it adds up is there, and adds when the parts of others have arrived; of more than two
ranks each adds up a part of the elements and passes it on to the others. None of this can be left to whoever wants the
sum, who is computing something else meanwhile, and the link would stand idle. So it is done by the thread that passes
on (:mod:`smp_strategy.distributed.collectives.relay`), a step of each all-reduce at a time, which ends when messages
are sent off::

    first    wait for what is added up    send
    second                                send        wait, add     send
    third                                             send          wait, add    ...

One travels while another is added up, and no more than a few need memory. A step of an all-reduce waits for steps of
the same and of earlier ones only, and all ranks start them in the same order, so some step can always be done.
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
from smp_strategy.distributed.work import Work, wait_for

__all__ = ["AllReduces"]


@final
class AllReduces:
    """See the module docstring.

    Args:
        messages: between the ranks.
        relay: does the steps.
    """

    def __init__(self, messages: Messages, relay: Relay) -> None:
        self._messages = messages
        self._relay = relay
        self._running: list[_Steps] = []

    def start(self, tensor: Tensor, after: Sequence[Work[object]]) -> Work[object]:
        """Add up all ranks' ``tensor``, in place, when everything in ``after`` is over."""
        tag = self._messages.new_tags(2)
        steps = self._exchange(tensor, after, tag) if self._messages.size <= 2 else self._in_parts(tensor, after, tag)
        done: Future[None] = Future()
        self._relay.submit(partial(self._begin, _Steps(steps, done)))

        def finish() -> None:
            if not done.done():
                self._relay.submit(self._finish_all)
            done.result()

        return Work(finish)

    def _begin(self, new: "_Steps") -> None:
        is_running = new.go_on()
        self._go_on()
        if is_running:
            self._running.append(new)

    def _go_on(self) -> None:
        self._running = [each for each in self._running if each.go_on()]

    def _finish_all(self) -> None:
        while self._running:
            self._go_on()

    def _exchange(self, tensor: Tensor, after: Sequence[Work[object]], tag: int) -> Iterator[None]:
        """Of two ranks: as many bytes as in parts, and one way less. Two summands have no order."""
        messages = self._messages
        others = [torch.empty_like(tensor) for _ in messages.peers]
        under_way = [messages.receive(other, peer, tag) for other, peer in zip(others, messages.peers, strict=True)]
        wait_for(after)
        under_way += [messages.send(tensor, peer, tag) for peer in messages.peers]
        yield
        wait_for(under_way)
        direct.add_up(tensor, others, is_first=False)

    def _in_parts(self, tensor: Tensor, after: Sequence[Work[object]], tag: int) -> Iterator[None]:
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
    steps: Iterator[None]
    done: Future[None]

    def go_on(self) -> bool:
        """Do the next step, if there is one."""
        try:
            next(self.steps)
        except StopIteration:
            self.done.set_result(None)
        except BaseException as error:
            self.done.set_exception(error)
        else:
            return True
        return False
