"""Interleaved collectives: a background thread does the steps of several at a time.

Left to the code that wants the result, which computes something else meanwhile, the steps of a collective would leave
the link idle. So the relay thread does them (:mod:`smp_strategy.distributed.background_wait`), one step of each
collective at a time; a step ends when messages are sent. For all-reduces::

    first    wait for the summand    send
    second                           send        wait, add     send
    third                                        send          wait, add    ...

One travels while another is added, and only a few need memory at a time. A step waits for the step before, of the same
collective on other ranks. All ranks start them in the same order, but one may do the second step of a collective while
another has not begun it yet and ends the one before. So there are at most four steps: the fourth waits for a third one,
which a rank does before the second of the next collective. With five, two ranks could wait for each other.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, final

from smp_strategy.distributed.background_wait import Relay
from smp_strategy.distributed.handle import Handle

__all__ = ["Interleaved"]


@final
class Interleaved:
    """Collectives under way.

    Args:
        relay: Thread that does their steps.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._running: list[_Steps] = []

    def start(self, steps: Iterator[None]) -> Handle[object]:
        """Do ``steps`` after each other, in turn with those of other collectives."""
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


class _Steps(NamedTuple):
    """A collective under way: its steps, and a future that is set after the last one."""

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
