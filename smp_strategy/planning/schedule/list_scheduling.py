"""List scheduling: a stage that is free takes the pass of highest priority whose inputs have arrived.

Rules define the priority. A stage may wait for a pass whose inputs are only *about* to arrive (``patience``): a weight
gradient, which only the optimizer needs, should not make a stage late for an input gradient.

Every stage limits its own microbatches in flight. If all stages wait because of these limits (programs that go back
and forth between stages need more in flight), the earliest pass runs against its limit: there is no deadlock.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

from smp_strategy.planning.schedule.step_graph import ScheduledPass, StepGraph

__all__ = ["Rules", "list_schedule"]


class Rules(NamedTuple):
    """Priorities and limits of a stage."""

    forward_first: bool = False
    splits: bool = False
    """Whether weight gradients, and the backward of the first segment, have the lowest priority."""
    most_microbatches: int | None = None
    """Most microbatches in flight on the stage."""
    most_live: int | None = None
    """Most visits in flight on the stage."""
    group: int | None = None
    """Microbatches that go through a visit before the first of them goes through the next one; ``None``: earlier
    microbatches first."""
    patience: float = 0.0
    """Time that the stage waits for a pass of higher priority, as a share of the pass that could run instead."""


def list_schedule(graph: StepGraph, rules: Sequence[Rules]) -> list[list[ScheduledPass]]:
    """Order of the passes of each stage under its rules."""
    stages = [_StageQueue(graph, rules[stage], stage) for stage in range(graph.num_stages)]
    ends: list[list[float]] = [[] for _ in graph.needs]
    waiting = _followers(graph)
    best = [stage.choose(ends) for stage in stages]
    left = sum(stage.num_left for stage in stages)
    while left:
        choices = [choice for choice in best if choice is not None]
        if not choices:
            choices = [choice for stage in stages if (choice := stage.choose(ends, ignore_caps=True)) is not None]
            assert choices, "the segments of the flow wait for each other"
        choice = min(choices)
        stages[choice.stage].run(choice, ends)
        left -= 1
        # Only the stage itself and those that wait for this pass can have another choice now.
        best[choice.stage] = stages[choice.stage].choose(ends)
        for other in waiting[choice.track]:
            best[other] = stages[other].choose(ends)
    return [stage.order for stage in stages]


def _followers(graph: StepGraph) -> list[set[int]]:
    """Other stages that wait for each track."""
    found: list[set[int]] = [set() for _ in graph.needs]
    for track, needs in enumerate(graph.needs):
        for need, _ in needs:
            if graph.stage_of(need) != graph.stage_of(track):
                found[need].add(graph.stage_of(track))
    return found


class _Choice(NamedTuple):
    """Next pass of a stage; the smallest of all stages runs first."""

    start: float
    rank: tuple[int, ...]
    stage: int
    track: int


@final
class _StageQueue:
    """Remaining passes of one stage, with their priorities."""

    def __init__(self, graph: StepGraph, rules: Rules, stage: int) -> None:
        self._stage = stage
        self._graph = graph
        self._free_at = 0.0
        self._rules = rules
        self._kinds: dict[int, str] = {}
        self._visits: list[tuple[int, list[int]]] = []
        self._ranks: dict[int, list[tuple[int, ...]]] = {}
        self._patience: dict[int, float] = {}
        self.order: list[ScheduledPass] = []
        for index, visit in enumerate(graph.visits[stage]):
            for segment in visit:
                self._add(index, segment)
            self._visits.append((visit[0], [t for t, kind in self._kinds.items() if t % len(graph.segments) in visit]))
        self._reached = dict.fromkeys(self._kinds, 0)
        self.num_left = graph.num_microbatches * len(self._kinds)

    def _add(self, visit: int, segment: int) -> None:
        graph, rules = self._graph, self._rules
        kinds = "F" if not graph.has_backward[segment] else "FIW" if rules.splits and graph.can_split[segment] else "FB"
        number = graph.segments[segment].number
        for kind in kinds:
            track = graph.track(kind, segment)
            self._kinds[track] = kind
            sign = 1 if kind == "F" else -1
            can_wait = kind == "W" or (kind == "B" and rules.splits and not graph.is_awaited[segment])
            place = 2 if can_wait else int((kind == "F") != rules.forward_first)
            self._patience[track] = rules.patience * graph.cost(kind, segment) if place else 0.0
            group = rules.group
            self._ranks[track] = [
                (place, mb, sign * number) if group is None else (place, mb // group, sign * visit, mb, sign * number)
                for mb in range(graph.num_microbatches)
            ]

    def choose(self, ends: list[list[float]], *, ignore_caps: bool = False) -> _Choice | None:
        """The pass of highest priority whose inputs are known; ``None`` if there is none within the limits."""
        best: tuple[float, tuple[int, ...], float, int] | None = None
        full = () if ignore_caps else self._closed()
        for track, microbatch in self._reached.items():
            if microbatch == self._graph.num_microbatches or track in full:
                continue
            start = self._free_at
            for need, delay in self._graph.needs[track]:
                done = ends[need]
                if len(done) <= microbatch:
                    break
                if done[microbatch] + delay > start:
                    start = done[microbatch] + delay
            else:
                late = start
                if self._patience[track]:
                    late += self._patience[track]
                key = (late, self._ranks[track][microbatch], start, track)
                if best is None or key < best:
                    best = key
        return None if best is None else _Choice(best[2], best[1], self._stage, best[3])

    def _closed(self) -> list[int]:
        """Tracks whose next pass would exceed the limits."""
        rules = self._rules
        closed: list[int] = []
        if rules.most_microbatches is not None:
            begin = self._visits[0][0] if self._visits else 0
            in_flight = self._reached[begin] - min(self._reached.values()) if self._visits else 0
            closed += [begin] if in_flight >= rules.most_microbatches else []
        if rules.most_live is not None:
            live = sum(
                self._reached[first] - min([self._reached[track] for track in tracks]) for first, tracks in self._visits
            )
            closed += [first for first, _ in self._visits] if live >= rules.most_live else []
        return closed

    def run(self, choice: _Choice, ends: list[list[float]]) -> None:
        """Append a pass to the order."""
        kind, segment = self._kinds[choice.track], choice.track % len(self._graph.segments)
        end = self._free_at = choice.start + self._graph.cost(kind, segment)
        ends[choice.track].append(end)
        self.order.append(ScheduledPass(kind, segment, self._reached[choice.track]))  # type: ignore[arg-type]
        self._reached[choice.track] += 1
