"""How far microbatches may take turns, where one finds what the one before it has left.

In one process a microbatch begins when the one before it has ended, so ``self.total += loss.item()`` finds the sum up
to then. Where microbatches take turns, a stage may have evaluated ``self.total`` before, while it waits for the loss.
A rehearsal (:mod:`smp_strategy.interleaving`) finds steps of which the results would differ. These run by a rule:

* Up to a number of calls microbatches take turns. There each waits on its stage until those before it have ended. That
  costs no time where all that follows are values that Python reads and one stage sends: it gets to them without
  waiting, and nobody waits for the others.
* If that does not help, microbatches run one after the other, without overlap of the stages.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from smp_strategy.pipeline.routing import Placement
from smp_strategy.trace.events import Event

__all__ = ["Gate", "TurnRule", "gate_position"]


class TurnRule(NamedTuple):
    """How a kind of step runs of which microbatches depend on each other."""

    gate: int | None
    """After how many events a microbatch waits for those before it; ``None``: it does not begin before they have
    ended."""
    path: tuple[str, ...]
    """Names of the events of the step that this was found out for."""
    names: tuple[str, ...]
    """Where the step leaves what the next microbatch finds."""


@final
class Gate:
    """Where a program lets those of earlier microbatches end before it goes on.

    Args:
        position: how many events it has had by then.
        wait: called once there.
    """

    def __init__(self, position: int, wait: Callable[[], None]) -> None:
        self._position = position
        self._wait = wait
        self._is_passed = False

    def reach(self, num_events: int) -> None:
        """The program has had so many events, and its own code is about to go on."""
        if num_events >= self._position and not self._is_passed:
            self._is_passed = True
            self._wait()


def gate_position(events: Sequence[tuple[Event, Placement]]) -> int | None:
    """After how many events microbatches can wait for each other on their stages, the earliest number.

    All that moves between stages afterwards must be read by Python, and come from one stage that waits for nothing.
    Otherwise the plan, which does not know of the wait, might have a stage wait for a microbatch that is not let go.

    Args:
        events: of a microbatch, with their places.
    """
    position = len(events)
    sources, targets = set[int](), set[int]()
    for event, placement in reversed(events):
        sources |= {move.source.stage for move in placement.moves}
        targets |= {move.target.stage for move in placement.moves}
        is_read = event.kind == "read" or not placement.moves
        if not is_read or len(sources) > 1 or sources & targets:
            return position
        position -= 1
    return None
