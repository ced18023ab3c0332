"""Schedules, computed: a list-scheduling simulation over the segment graph gives every stage its order of actions.

Whenever a stage is free it takes the best of its actions whose inputs are there. The policy says which is best:

* ``simple``: a forward if there is one, so all forwards come before the backwards (GPipe);
* ``interleaved``: a backward if there is one, and no new microbatch while ``active_microbatches`` are in flight on
  the stage (SageMaker's schedule; on a chain of stages it is 1F1B with a longer warm-up).

The forwards of a segment run in the order of the microbatches, and so do its backwards: gradients are added up in
the order of one process that accumulates over the same microbatches, which makes the sums bit-identical.

The simulated order is a linear order of the dependency graph, so stages that follow it cannot deadlock.
"""

from typing import Literal

from smp_strategy.pipeline.routing import Flow, SegmentId
from smp_strategy.pipeline.schedule import Action, Plan

__all__ = ["simulate"]

# A segment without compute (it only forwards or reads a value) still takes its turn.
SMALLEST_COST = 1e-9

Track = tuple[Literal["F", "B"], SegmentId]
"""The forwards, or the backwards, of one segment over all microbatches; they run in the order of the microbatches."""
Task = tuple[Track, int]
"""A track and a microbatch."""


def simulate(
    flow: Flow,
    num_microbatches: int,
    *,
    policy: Literal["interleaved", "simple"] = "interleaved",
    active_microbatches: int | None = None,
) -> Plan:
    """Order the work of a step.

    Args:
        flow: segments of one microbatch and their dependencies.
        num_microbatches: microbatches of the step.
        policy: see the module docstring.
        active_microbatches: most microbatches in flight on a stage under ``interleaved``; default: stages + 2.

    Returns:
        The plan of every stage. Two stages, four microbatches, two in flight::

            stage 0   F0 F1 B0 F2 B1 F3 B2 B3
            stage 1   F0 B0 F1 B1 F2 B2 F3 B3
    """
    cap = num_microbatches if policy == "simple" else active_microbatches or flow.num_stages + 2
    clock = _Clock(flow, num_microbatches, first="F" if policy == "simple" else "B", cap=cap)
    actions: list[list[Action]] = [[] for _ in range(flow.num_stages)]
    times: list[list[tuple[float, float]]] = [[] for _ in range(flow.num_stages)]
    while (choice := clock.next()) is not None:
        start, ((kind, segment), microbatch) = choice
        actions[segment.stage].append(Action(kind, microbatch, segment.number))
        times[segment.stage].append((start, clock.run(start, ((kind, segment), microbatch))))
    assert clock.is_done, "the segments of the flow wait for each other"
    return Plan(tuple(map(tuple, actions)), tuple(map(tuple, times)))


class _Clock:
    """The simulated machine: which work is done, and which comes next."""

    def __init__(self, flow: Flow, num_microbatches: int, *, first: str, cap: int) -> None:
        self._flow = flow
        self._num_microbatches = num_microbatches
        self._first = first
        self._cap = cap
        self._end: dict[Task, float] = {}
        self._free_at = [0.0] * flow.num_stages
        self._needs: dict[Track, list[Track]] = {}
        self._tracks: list[list[Track]] = [[] for _ in range(flow.num_stages)]
        for segment in flow.work:
            self._add("F", segment, [("F", other) for other in flow.forward_needs[segment]])
        for segment, before in flow.backward_needs.items():
            # Backward begins when the stage has finished the whole forward of the microbatch.
            last = SegmentId(segment.stage, flow.num_segments(segment.stage) - 1)
            self._add("B", segment, [("F", last), *(("B", other) for other in before)])
        self._reached: dict[Track, int] = dict.fromkeys(self._needs, 0)

    def _add(self, kind: Literal["F", "B"], segment: SegmentId, needs: list[Track]) -> None:
        self._needs[kind, segment] = needs
        self._tracks[segment.stage].append((kind, segment))

    def next(self) -> tuple[float, Task] | None:
        """The action that starts first on any stage, with its start; ``None`` when all work is done."""
        choices = [choice for stage in range(self._flow.num_stages) for choice in self._choices(stage)]
        if not choices:
            return None
        start, _, task = min(choices)
        return start, task

    @property
    def is_done(self) -> bool:
        """Whether every action has run."""
        return all(reached == self._num_microbatches for reached in self._reached.values())

    def run(self, start: float, task: Task) -> float:
        """Do ``task``; returns its end."""
        track, microbatch = task
        self._end[task] = self._free_at[track[1].stage] = start + self._cost(track)
        self._reached[track] = microbatch + 1
        return self._end[task]

    def _choices(self, stage: int) -> list[tuple[float, tuple[bool, int, int], Task]]:
        found = []
        for track in self._tracks[stage]:
            task = (track, self._reached[track])
            ready = self._ready(task)
            if ready is not None:
                found.append((max(ready, self._free_at[stage]), self._rank(task), task))
        return found

    def _ready(self, task: Task) -> float | None:
        """When the inputs of ``task`` are there; ``None`` while it has to wait for work that is not chosen yet."""
        track, microbatch = task
        if microbatch == self._num_microbatches or (self._begins(track) and self._in_flight(track) >= self._cap):
            return None
        needs = [(need, microbatch) for need in self._needs[track]]
        if any(need not in self._end for need in needs):
            return None
        return max((self._end[need] for need in needs), default=0.0)

    def _rank(self, task: Task) -> tuple[bool, int, int]:
        """Smaller is better."""
        (kind, segment), microbatch = task
        return kind != self._first, microbatch, segment.number if kind == "F" else -segment.number

    @staticmethod
    def _begins(track: Track) -> bool:
        return track[0] == "F" and track[1].number == 0

    def _in_flight(self, track: Track) -> int:
        """Microbatches that the stage has begun and not finished."""
        mine = self._tracks[track[1].stage]
        return self._reached[track] - min(self._reached[other] for other in mine)

    def _cost(self, track: Track) -> float:
        kind, segment = track
        work = self._flow.work[segment]
        return max(work.backward if kind == "B" else work.forward, SMALLEST_COST)
