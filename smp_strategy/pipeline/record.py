"""The record that a program writes of itself: its events, the values in them, and where each event runs.

Every stage writes the same record. The schedule of a step was made for the record of an earlier one; a program notices
here that it takes another path.

Nearly always it takes the path of the program that ended last. So a record *follows* that one as long as their events
are the same, and takes its entries over instead of making and placing them anew; where they part, it places what it has
taken over, and goes on by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, final

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Event, Value
from smp_strategy.model.trace.prediction import Prediction
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.routing import MOST_MOVES, Placement, Router, SegmentId, gradient_uses

__all__ = ["Latest", "ProgramTrace"]


@final
class Latest:
    """Holds the record of the program on a stage that has ended last, if any."""

    record: "ProgramTrace | None" = None


@final
class ProgramTrace:
    """See the module docstring.

    Args:
        new_router: makes a router, which decides where events run.
        expected: signatures of the events that the plan was made for; ``None`` where there is no plan.
        latest: where to find a record to follow, and to leave this one.
    """

    def __init__(self, new_router: Callable[[], Router], expected: Sequence[object] | None, latest: Latest) -> None:
        self.events: list[tuple[Event, Placement]] = []
        # Whether the program took another path than the plan was made for.
        self.left_plan = False
        self._new_router = new_router
        self._router = new_router()
        self._expected = expected
        self._latest = latest
        self._predictions: list[Prediction | None] = []
        self._num_values = 0
        self._leader: ProgramTrace | None = None
        # Whether the leader was on the path of the plan: nothing has to be compared as long as it is followed.
        self._is_on_path = False
        # Shared with the records that this one follows, as long as it does.
        self._returning: dict[tuple[int, int | None], frozenset[tuple[int, int]]] = {}

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self._router.num_stages

    @property
    def path(self) -> list[str]:
        """Names of the events."""
        return [event.name or event.kind for event, _ in self.events]

    def value(self, spec: TensorSpec) -> Value:
        """A new value."""
        self._num_values += 1
        return Value(self._num_values - 1, spec.nbytes, spec.requires_grad)

    def home(self, value: Value) -> int:
        """The stage that made ``value``."""
        return self._router.home(value.id)

    def returning(self, loss: int | None) -> frozenset[tuple[int, int]]:
        """Numbers of values with the stages that send their gradients back, if ``loss`` is the loss."""
        key = (len(self.events), loss)
        if key not in self._returning:
            _, uses = gradient_uses(self.events, loss)
            self._returning[key] = frozenset((value, user.stage) for value, user in uses)
        return self._returning[key]

    def call(
        self, kind: Literal["unit", "op"], name: str, inputs: tuple[Value, ...], prediction: Prediction
    ) -> tuple[Event, Placement]:
        """Add a call of which the result is predicted, and decide where it runs."""
        if not self.events:
            self._follow()
        position, leader = len(self.events), self._leader
        if leader is not None:
            if position < len(leader.events) and leader._predictions[position] is prediction:
                entry = leader.events[position]
                if entry[0].inputs == inputs and entry[0].name == name and entry[0].kind == kind:
                    self._num_values += len(entry[0].outputs)
                    self._add(entry, prediction)
                    return entry
            self._part()
        outputs = [self.value(spec) for spec in (*prediction.made, *prediction.changed.values())]
        event = Event(kind, name, inputs, tuple(outputs), prediction.effort, prediction.saved_bytes)
        event = event._replace(kept=prediction.kept)
        entry = (event, self._route(event))
        self._add(entry, prediction)
        return entry

    def place(self, event: Event, *, is_whole: bool = True) -> Placement:
        """Add any other event, and decide where it runs.

        Args:
            event: what happens next.
            is_whole: its outputs are all known; otherwise :meth:`complete` has to follow.
        """
        if not self.events:
            self._follow()
        position, leader = len(self.events), self._leader
        if leader is not None:
            if is_whole and position < len(leader.events) and leader.events[position][0] == event:
                self._add(leader.events[position], None)
                return self.events[position][1]
            self._part()
        placement = self._route(event)
        self._add((event, placement), None, is_whole=is_whole)
        return placement

    def complete(self, position: int, outputs: Sequence[Value], prediction: Prediction) -> None:
        """The event at ``position`` has these ``outputs``, too, and costs what ``prediction`` says; the events after it
        are whole now."""
        event, placement = self.events[position]
        self._router.settle(outputs, placement.stages)
        outputs = (*event.outputs, *outputs)
        event = event._replace(outputs=outputs, effort=prediction.effort, saved_bytes=prediction.saved_bytes)
        event = event._replace(kept=prediction.kept)
        self.events[position] = (event, placement)
        for later in range(position, len(self.events)):
            self._check_path(later)

    def given(self, spec: TensorSpec, stages: Iterable[int]) -> tuple[Value, SegmentId]:
        """A value that exists already, on ``stages``, and where it is at home."""
        value, home = self.value(spec), tuple(sorted(stages))
        self.place(Event("given", "", (), (value,), home=home))
        return value, SegmentId(home[0], 0)

    def end(self) -> None:
        """There are no more events."""
        self.left_plan |= self._expected is not None and len(self.events) < len(self._expected)
        self._leader = None  # it would keep all records before it
        self._latest.record = self

    def _add(self, entry: tuple[Event, Placement], prediction: Prediction | None, *, is_whole: bool = True) -> None:
        self.events.append(entry)
        self._predictions.append(prediction)
        if is_whole and not self._is_on_path:
            self._check_path(len(self.events) - 1)

    def _follow(self) -> None:
        self._leader = self._latest.record
        if self._leader is not None:
            self._router = self._leader._router  # which knows where all values will be
            self._returning = self._leader._returning
            self._is_on_path = self._leader._expected is self._expected and not self._leader.left_plan

    def _part(self) -> None:
        self._leader, self._is_on_path = None, False
        self._returning = {}
        self._router = self._new_router()
        for event, _ in self.events:
            self._router.place(event)

    def _route(self, event: Event) -> Placement:
        placement = self._router.place(event)
        if placement.moves and placement.moves[-1].number >= MOST_MOVES:
            raise UnsupportedError(
                f"A microbatch moves more than {MOST_MOVES} tensors between stages. Move loops that cross stages "
                "(text generation, say) out of the step."
            )
        return placement

    def _check_path(self, position: int) -> None:
        if self._expected is not None and not self.left_plan:
            signature = self.events[position][0].signature
            self.left_plan = position >= len(self._expected) or signature != self._expected[position]
