"""List scheduling: a stage that is free takes the pass of highest priority whose inputs have arrived.

Rules define the priority. A stage may wait for a pass whose inputs are only *about* to arrive (``patience``): a weight
gradient, which only the optimizer needs, should not make a stage late for an input gradient.

Every stage limits its own microbatches in flight. If all stages wait because of these limits (programs that go back
and forth between stages need more in flight), the earliest pass runs against its limit: there is no deadlock.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, final

from smp_strategy.planning.schedule.step_graph import PassKind, ScheduledPass, StepGraph

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
    followers = _followers(graph)
    best = [stage.choose() for stage in stages]
    # Choices that are not in `best` any more are passed over.
    heap = [choice for choice in best if choice is not None]
    heapify(heap)
    for _ in range(sum(stage.num_left for stage in stages)):
        while heap and heap[0] is not best[heap[0].stage]:
            heappop(heap)
        if heap:
            choice = heappop(heap)
        else:
            choices = [each for stage in stages if (each := stage.choose(ignore_caps=True)) is not None]
            assert choices, "the segments of the flow wait for each other"
            choice = min(choices)
        microbatch = stages[choice.stage].run(choice, ends)
        # Only the stage itself and those that wait for this pass can have another choice now.
        changed = {choice.stage}
        for other, track in followers[choice.track]:
            if stages[other].reached.get(track) == microbatch:
                stages[other].look(track, ends)
                changed.add(other)
        for stage in changed:
            found = best[stage] = stages[stage].choose()
            if found is not None:
                heappush(heap, found)
    return [stage.order for stage in stages]


def _followers(graph: StepGraph) -> list[list[tuple[int, int]]]:
    """Tracks that wait for each track, with their stage."""
    found: list[list[tuple[int, int]]] = [[] for _ in graph.needs]
    for track, needs in enumerate(graph.needs):
        for need, _ in needs:
            found[need].append((graph.stage_of(track), track))
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
        self._passes: dict[int, list[ScheduledPass]] = {}
        self.order: list[ScheduledPass] = []
        for index, visit in enumerate(graph.visits[stage]):
            for segment in visit:
                self._add(index, segment)
            self._visits.append((visit[0], [t for t, kind in self._kinds.items() if t % len(graph.segments) in visit]))
        self.reached = dict.fromkeys(self._kinds, 0)
        self._arrivals: dict[int, float | None] = {}
        for track in self._kinds:
            self.look(track, [[] for _ in graph.needs])
        self.num_left = graph.num_microbatches * len(self._kinds)

    def _add(self, visit: int, segment: int) -> None:
        graph, rules = self._graph, self._rules
        kinds: Sequence[PassKind] = ("F",)
        if graph.has_backward[segment]:
            kinds = ("F", "I", "W") if rules.splits and graph.can_split[segment] else ("F", "B")
        number = graph.segments[segment].number
        for kind in kinds:
            track = graph.track(kind, segment)
            self._kinds[track] = kind
            self._passes[track] = graph.passes(kind, segment)
            sign = 1 if kind == "F" else -1
            can_wait = kind == "W" or (kind == "B" and rules.splits and not graph.is_awaited[segment])
            place = 2 if can_wait else int((kind == "F") != rules.forward_first)
            self._patience[track] = rules.patience * graph.cost(kind, segment) if place else 0.0
            group = rules.group
            self._ranks[track] = [
                (place, mb, sign * number) if group is None else (place, mb // group, sign * visit, mb, sign * number)
                for mb in range(graph.num_microbatches)
            ]

    def look(self, track: int, ends: list[list[float]]) -> None:
        """Note when the inputs of the next pass of ``track`` arrive, if they are known."""
        microbatch = self.reached[track]
        self._arrivals[track] = None
        if microbatch == self._graph.num_microbatches:
            return
        arrival = 0.0
        for need, delay in self._graph.needs[track]:
            done = ends[need]
            if len(done) <= microbatch:
                return
            arrival = max(arrival, done[microbatch] + delay)
        self._arrivals[track] = arrival

    def choose(self, *, ignore_caps: bool = False) -> _Choice | None:
        """The pass of highest priority whose inputs are known; ``None`` if there is none within the limits."""
        best: tuple[float, tuple[int, ...], float, int] | None = None
        full = () if ignore_caps else self._closed()
        for track, arrival in self._arrivals.items():
            if arrival is None or track in full:
                continue
            start = max(self._free_at, arrival)
            key = (start + self._patience[track], self._ranks[track][self.reached[track]], start, track)
            if best is None or key < best:
                best = key
        return None if best is None else _Choice(best[2], best[1], self._stage, best[3])

    def _closed(self) -> list[int]:
        """Tracks whose next pass would exceed the limits."""
        rules = self._rules
        closed: list[int] = []
        if rules.most_microbatches is not None:
            begin = self._visits[0][0] if self._visits else 0
            in_flight = self.reached[begin] - min(self.reached.values()) if self._visits else 0
            closed += [begin] if in_flight >= rules.most_microbatches else []
        if rules.most_live is not None:
            live = sum(
                self.reached[first] - min([self.reached[track] for track in tracks]) for first, tracks in self._visits
            )
            closed += [first for first, _ in self._visits] if live >= rules.most_live else []
        return closed

    def run(self, choice: _Choice, ends: list[list[float]]) -> int:
        """Append a pass to the order; returns its microbatch."""
        kind, segment = self._kinds[choice.track], choice.track % len(self._graph.segments)
        end = self._free_at = choice.start + self._graph.cost(kind, segment)
        ends[choice.track].append(end)
        microbatch = self.reached[choice.track]
        self.order.append(self._passes[choice.track][microbatch])
        self.reached[choice.track] = microbatch + 1
        self.look(choice.track, ends)
        return microbatch
