"""Program trace of a microbatch: its events, their values, and the stage of each event.

Every stage writes the same trace, and the plan of a step was made for an earlier one; a departure from the planned path
is noticed here. Most programs repeat the path of the program before them: see [Note: following a trace] below.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, final

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Event, Value
from smp_strategy.model.trace.prediction import Prediction
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.routing import MOST_MOVES, Placement, Router, SegmentId, gradient_uses

__all__ = ["Latest", "ProgramTrace"]


# [Note: following a trace]
# Making and routing an event costs more than many operations of the glue, and nearly all microbatches take the same
# path. So a trace *follows* the one that ended last (its leader): as long as their events are equal it takes over the
# leader's entries, and with them the numbers of the values.
#
# Why the router is shared: the leader has ended, so its router has settled the home of every value, also of those that
# the follower has not reached. A follower only asks it (`home`) and never places events with it; several followers can
# share it, and it stays right for all of them because equal events have equal value numbers.
#
# At the first event that differs the trace parts from its leader: it needs a router of its own, whose state (homes,
# segments, moves) must be what it would be without a leader, so the events taken over are placed again.


@final
class Latest:
    """The program trace that ended last on a stage, if any."""

    trace: "ProgramTrace | None" = None


@final
class ProgramTrace:
    """Events of one program with their placements, compared with the path of the plan as they are added.

    Args:
        expected: signatures of the events that the plan was made for; ``None`` without a plan.
        latest: holder of the trace to follow, which :meth:`end` replaces by this one.
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
        # A leader of another plan says nothing of this one, so `_follow` compares `_expected` by identity.
        self._is_on_path = False
        self.has_ended = False
        # Shared with the leader as long as it is followed; the keys hold the number of events, which fixes the path.
        self._returning: dict[tuple[int, int | None], frozenset[tuple[int, int]]] = {}

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self._router.num_stages

    @property
    def is_planned(self) -> bool:
        return self._expected is not None

    @property
    def path(self) -> list[str]:
        """Names of the events."""
        return [event.name or event.kind for event, _ in self.events]

    def value(self, spec: TensorSpec) -> Value:
        """Number a new value."""
        self._num_values += 1
        return Value(self._num_values - 1, spec.nbytes, spec.requires_grad)

    def home(self, value: Value) -> int:
        """The stage that made ``value``."""
        return self._router.home(value.id)

    def returning(self, loss: int | None) -> frozenset[tuple[int, int]]:
        """Pairs (value number, stage that sends its gradient back) for the loss with the number ``loss``."""
        key = (len(self.events), loss)
        if key not in self._returning:
            _, uses = gradient_uses(self.events, loss)
            self._returning[key] = frozenset((value, user.stage) for value, user in uses)
        return self._returning[key]

    def call(
        self, kind: Literal["unit", "op"], name: str, inputs: tuple[Value, ...], prediction: Prediction
    ) -> tuple[Event, Placement]:
        """Add a call with a predicted result, and place it."""
        # At the first event, not in the constructor: all records of a step are made before one of them has ended.
        if not self.events:
            self._follow()
        position, leader = len(self.events), self._leader
        if leader is not None:
            # Identity is enough and cheap: the shape_inference returns the same object for equal calls.
            if position < len(leader.events) and leader._predictions[position] is prediction:
                entry = leader.events[position]
                if entry[0].inputs == inputs and entry[0].name == name and entry[0].kind == kind:
                    # The outputs have the numbers that they would get here.
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
        """Add any other event, and place it. Unless it ``is_whole``, :meth:`complete` has to follow with further
        outputs.
        """
        if not self.events:
            self._follow()
        position, leader = len(self.events), self._leader
        if leader is not None:
            # An incomplete event always parts: `complete` settles outputs in the router, which must not be shared then.
            if is_whole and position < len(leader.events) and leader.events[position][0] == event:
                self._add(leader.events[position], None)
                return self.events[position][1]
            self._part()
        placement = self._route(event)
        self._add((event, placement), None, is_whole=is_whole)
        return placement

    def complete(self, position: int, outputs: Sequence[Value], prediction: Prediction) -> None:
        """Complete the event at ``position`` with these further ``outputs`` and the costs of ``prediction``.

        The events after it are whole from now on.
        """
        event, placement = self.events[position]
        self._router.settle(outputs, placement.stages)
        outputs = (*event.outputs, *outputs)
        event = event._replace(outputs=outputs, effort=prediction.effort, saved_bytes=prediction.saved_bytes)
        event = event._replace(kept=prediction.kept)
        self.events[position] = (event, placement)
        # Signatures contain the outputs, so none of these could be compared before.
        for later in range(position, len(self.events)):
            self._check_path(later)

    def given(self, spec: TensorSpec, stages: Iterable[int]) -> tuple[Value, SegmentId]:
        """Add a value that exists already on ``stages``; returns it with its home segment."""
        value, home = self.value(spec), tuple(sorted(stages))
        self.place(Event("given", "", (), (value,), home=home))
        return value, SegmentId(home[0], 0)

    def end(self) -> None:
        self.has_ended = True
        self.left_plan |= self._expected is not None and len(self.events) < len(self._expected)
        self._leader = None  # it would keep all records before it
        self._latest.trace = self

    def _add(self, entry: tuple[Event, Placement], prediction: Prediction | None, *, is_whole: bool = True) -> None:
        self.events.append(entry)
        self._predictions.append(prediction)
        if is_whole and not self._is_on_path:
            self._check_path(len(self.events) - 1)

    def _follow(self) -> None:
        """Begin to take over the entries of the latest trace; see [Note: following a trace]."""
        self._leader = self._latest.trace
        if self._leader is not None:
            self._router = self._leader._router
            self._returning = self._leader._returning
            # With another plan, or off the plan, every event is compared as if there were no leader.
            self._is_on_path = self._leader._expected is self._expected and not self._leader.left_plan

    def _part(self) -> None:
        """Leave the leader's path; see [Note: following a trace]."""
        self._leader, self._is_on_path = None, False
        # New objects, not cleared ones: the leader and its other followers go on using theirs.
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
