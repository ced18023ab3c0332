"""Routing: the stage of each call of the program, and the values that must be sent for it.

The rule, applied to the events of a microbatch in program order:

* a unit runs on its stage;
* an operation of the glue runs on the stage that made the newest of its inputs;
* a read by Python code happens on every stage;
* a tensor from outside the step stays on the stages that hold it;
* a value that a stage needs and does not hold is sent there by the stage that made it, once.

A stage's part of a microbatch is cut into *segments* ([Note: segments] below). All stages apply the rule to the same
events, so sends and receives match by construction. The rule has no tensors in it: the runtime applies it while the
program runs, the scheduler applies it to a trace before anything runs.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple, final

from smp_strategy.model.trace.events import Event, Value

__all__ = ["MOST_MOVES", "Move", "Placement", "Router", "SegmentId", "gradient_uses"]

# Values that a microbatch may move; messages of two microbatches have different tags.
MOST_MOVES: Final = 1 << 15

# [Note: segments]
# A segment is a run of one microbatch on one stage that needs no message once it has begun. It is the unit that a plan
# orders, that a coroutine runs without a pause, and that backward runs as one autograd graph. A new one begins where
# the stage must wait for another stage and has computed or sent something since the last wait:
#
#     stage 0   [0: embed, block 0] --h--.                   .--y--> [1: loss of a tied head]
#     stage 1                            '--> [0: block 1] --'
#
# * Two waits in a row are one: nothing lies between them that could run earlier.
# * Sending counts as work. If a segment could begin with a wait and contain a send before it, the stage would have to
#   receive before it sends, and two such stages would wait for each other.
# * `LocalGraph` cuts at the same places while the program runs, with real tensors; it asserts that both agree.


class SegmentId(NamedTuple):
    """Stage and number of a segment; see [Note: segments]."""

    stage: int
    number: int


class Move(NamedTuple):
    """Point-to-point transfer of a value from the stage that made it to one that needs it."""

    value: Value
    number: int
    """Position among all moves of the microbatch; determines the message tag."""
    source: SegmentId
    """Segment that sends the value."""
    target: SegmentId
    """Segment that waits for the value."""


class Placement(NamedTuple):
    """Routing decision for one event."""

    stages: tuple[int, ...]
    """Stages that run the event: one, or all of them for a read; for a given tensor, the stages that hold it."""
    segments: tuple[SegmentId, ...]
    """The segment of each of ``stages`` that runs it."""
    moves: tuple[Move, ...]
    """Transfers that must precede the event."""


@final
class Router:
    """Applies the routing rule to the events of one microbatch, one after the other."""

    def __init__(self, stage_of: Mapping[str, int], num_stages: int) -> None:
        self._stage_of = stage_of
        self.num_stages = num_stages
        self._all = tuple(range(num_stages))
        self._segment = [0] * num_stages
        self._worked = [False] * num_stages
        self._home: dict[int, int] = {}
        self._held: set[tuple[int, int]] = set()
        self._everywhere: set[int] = set()
        self._num_moves = 0

    def place(self, event: Event) -> Placement:
        """Choose the stages and moves of ``event``; its outputs then live on these stages."""
        stages = self._stages(event)
        moves = self._moves(event.inputs, stages)
        segments = tuple([SegmentId(stage, self._segment[stage]) for stage in stages])
        if event.kind in ("unit", "op"):
            self._worked[stages[0]] = True
        self.settle(event.outputs, stages)
        return Placement(stages, segments, moves)

    def settle(self, values: Iterable[Value], stages: Collection[int]) -> None:
        """Set the home of ``values`` to the first of ``stages``; all of ``stages`` hold them."""
        for value in values:
            self._home[value.id] = min(stages)
            self._held.update([(value.id, stage) for stage in stages])
            if len(stages) == self.num_stages > 1:
                self._everywhere.add(value.id)

    def home(self, value: int) -> int:
        """The stage that made ``value``."""
        return self._home[value]

    def _stages(self, event: Event) -> tuple[int, ...]:
        if event.kind == "unit":
            return (self._stage_of[event.name],)
        if event.kind == "read":
            return self._all
        if event.kind == "given":
            return event.home
        # A value that every stage holds attracts the operation nowhere, unless there are no others.
        pulling = [value for value in event.inputs if value.id not in self._everywhere] or event.inputs
        newest = max(value.id for value in pulling)
        return (self._home[newest],)

    def _moves(self, values: Iterable[Value], stages: Iterable[int]) -> tuple[Move, ...]:
        unique = dict.fromkeys(values)
        missing = [(value, stage) for stage in stages for value in unique if (value.id, stage) not in self._held]
        if not missing:
            return ()
        # Sources first, as sending counts as work: a stage that sends and receives for the same event sends from its
        # old segment and waits in a new one. See [Note: segments].
        sources = [SegmentId(home, self._segment[home]) for home in (self._home[value.id] for value, _ in missing)]
        for source in sources:
            self._worked[source.stage] = True
        for stage in dict.fromkeys(stage for _, stage in missing):
            if self._worked[stage]:
                self._segment[stage] += 1
                self._worked[stage] = False
        moves = []
        for (value, stage), source in zip(missing, sources, strict=True):
            self._held.add((value.id, stage))
            moves.append(Move(value, self._num_moves, source, SegmentId(stage, self._segment[stage])))
            self._num_moves += 1
        return tuple(moves)


def gradient_uses(
    events: Iterable[tuple[Event, Placement]], loss: int | None
) -> tuple[set[int], set[tuple[int, SegmentId]]]:
    """Find the values with a gradient, and the uses that send one back, by a reverse pass over the events.

    A value gets a gradient if it requires one and the loss depends on it. Within one event every output is taken to
    depend on every input.

    Returns:
        The numbers of the values with a gradient, and pairs (value, segment that used it and returns a gradient).
    """
    wanted = set() if loss is None else {loss}
    uses: set[tuple[int, SegmentId]] = set()
    for event, placement in reversed(list(events)):
        if not any(value.requires_grad and value.id in wanted for value in event.outputs):
            continue
        for value in event.inputs:
            if value.requires_grad:
                wanted.add(value.id)
                uses.add((value.id, placement.segments[0]))
    return wanted, uses
