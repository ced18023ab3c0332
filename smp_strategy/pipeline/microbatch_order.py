"""Order of microbatches in steps that carry state from one microbatch to the next.

In one process a microbatch begins when the one before it has ended, so ``self.total += loss.item()`` finds the sum up
to then. Where microbatches take turns, a stage may have evaluated ``self.total`` before it waits for the loss. A
rehearsal (:mod:`smp_strategy.engine.carried_state`) finds steps whose results would differ. Such a step runs by one of
two rules:

* Microbatches take turns up to a *gate*, a number of calls. There each waits on its stage until those before it have
  ended. No stage idles for that if the rest of the step only reads values of one stage: that stage reaches its gate
  when the earlier microbatches have ended there, and the other stages send nothing more.
* Microbatches run one after the other, and stages do not overlap.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from smp_strategy.model.trace.events import Event
from smp_strategy.pipeline.routing import Placement

__all__ = ["Gate", "TurnRule", "gate_position"]


class TurnRule(NamedTuple):
    """The order of microbatches in a kind of step that carries state between them."""

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
