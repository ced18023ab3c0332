"""Order of microbatches in steps that carry state from one microbatch to the next (loop-carried dependencies).

In a single process a microbatch begins when the previous one has ended, so ``self.total += loss.item()`` finds the sum
so far. With interleaved microbatches, a stage may have evaluated ``self.total`` before it waits for the loss. A
rehearsal (:mod:`smp_strategy.engine.carried_state`) finds steps whose results would differ. Such a step runs by one of
two rules:

* Microbatches take turns up to a *gate*, a number of calls. There each waits on its stage until the earlier ones have
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
    """Order of microbatches in a kind of step that carries state between them."""

    gate: int | None
    """Number of events after which a microbatch waits for the earlier ones to end; ``None``: it begins after that."""
    path: tuple[str, ...]
    """Names of the events of the step for which the rule was found."""
    names: tuple[str, ...]
    """Names of the places with the state that is carried over."""


@final
class Gate:
    """Point of a program at which it waits until the earlier microbatches have ended.

    Args:
        position: number of events before the gate.
        wait: called once, when the program reaches the gate.
    """

    def __init__(self, position: int, wait: Callable[[], None]) -> None:
        self._position = position
        self._wait = wait
        self._is_passed = False

    def reach(self, num_events: int) -> None:
        """Wait if the gate is reached; call it after every event, before the program's own code continues."""
        if num_events >= self._position and not self._is_passed:
            self._is_passed = True
            self._wait()


def gate_position(events: Sequence[tuple[Event, Placement]]) -> int | None:
    """Smallest number of events after which microbatches can wait for each other on their stages.

    All later moves must be reads by Python, from one stage that itself receives nothing. Otherwise the plan, which does
    not know of the wait, might have a stage wait for a microbatch that is held at the gate.

    Args:
        events: events of a microbatch, with their placements.

    Returns:
        The position of the gate; ``None`` if it would be the beginning.
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
