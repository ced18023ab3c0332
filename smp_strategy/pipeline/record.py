"""The record that a program writes of itself: its events, the values in them, and where each event runs.

Every stage writes the same record. The schedule of a step was made for the record of an earlier one; a program notices
here that it takes another path.
"""

from collections.abc import Iterable, Sequence
from typing import final

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.local_graph import MOST_MOVES
from smp_strategy.pipeline.routing import Placement, Router, SegmentId
from smp_strategy.trace.events import Event, Value
from smp_strategy.trace.spec import TensorSpec

__all__ = ["Record"]


@final
class Record:
    """See the module docstring.

    Args:
        router: decides where events run.
        expected: signatures of the events that the plan was made for; ``None`` where there is no plan.
    """

    def __init__(self, router: Router, expected: Sequence[object] | None) -> None:
        self.events: list[tuple[Event, Placement]] = []
        self.num_stages = router.num_stages
        # Whether the program took another path than the plan was made for.
        self.left_plan = False
        self._router = router
        self._expected = expected
        self._num_values = 0

    def value(self, spec: TensorSpec) -> Value:
        """A new value."""
        self._num_values += 1
        return Value(self._num_values - 1, spec.nbytes, spec.requires_grad)

    def home(self, value: Value) -> int:
        """The stage that made ``value``."""
        return self._router.home(value.id)

    def place(self, event: Event, *, is_whole: bool = True) -> Placement:
        """Add ``event`` and decide where it runs.

        Args:
            event: what happens next.
            is_whole: its outputs are all known; otherwise :meth:`complete` has to follow.
        """
        placement = self._router.place(event)
        if placement.moves and placement.moves[-1].number >= MOST_MOVES:
            raise UnsupportedError(
                f"A microbatch moves more than {MOST_MOVES} tensors between stages. Move loops that cross stages "
                "(text generation, say) out of the step."
            )
        self.events.append((event, placement))
        if is_whole:
            self._check_path(len(self.events) - 1)
        return placement

    def complete(self, position: int, outputs: Sequence[Value], costs: tuple[int, int, int]) -> None:
        """The event at ``position`` has these ``outputs``, too, and these costs; the events after it are whole now."""
        event, placement = self.events[position]
        self._router.settle(outputs, placement.stages)
        flops, traffic, saved_bytes = costs
        event = event._replace(
            outputs=(*event.outputs, *outputs), flops=flops, traffic=traffic, saved_bytes=saved_bytes
        )
        self.events[position] = (event, placement)
        for later in range(position, len(self.events)):
            self._check_path(later)

    def given(self, spec: TensorSpec, stages: Iterable[int]) -> tuple[Value, SegmentId]:
        """A value that exists already, on ``stages``, and where it is at home."""
        value, home = self.value(spec), tuple(sorted(stages))
        self.place(Event("given", "", (), (value,), home=home))
        return value, SegmentId(home[0], 0)

    @property
    def path(self) -> list[str]:
        """Names of the events."""
        return [event.name or event.kind for event, _ in self.events]

    def end(self) -> None:
        """There are no more events."""
        self.left_plan |= self._expected is not None and len(self.events) < len(self._expected)

    def _check_path(self, position: int) -> None:
        if self._expected is not None and not self.left_plan:
            signature = self.events[position][0].signature
            self.left_plan = position >= len(self._expected) or signature != self._expected[position]
