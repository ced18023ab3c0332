"""Dependency graph of the passes of a step, as numbers: built once and shared by all schedules that are simulated.

A *track* is one kind of pass of one segment over all microbatches; it runs in the order of the microbatches, so that
gradients are added up in the order of a single process that accumulates over them. With ``n`` segments, tracks
``0..n-1`` are forwards, ``n..2n-1`` backwards (whole ones, or their input gradients), ``2n..3n-1`` weight gradients.

:meth:`StepGraph.follow` computes the times of passes from their order on each stage. An order that would deadlock is
repaired: the pass that can start first goes first.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple, final

from smp_strategy.model.trace.work import Link
from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.planning.schedule.flow import Flow
from smp_strategy.planning.schedule.published import ChunkPass

__all__ = ["Orders", "PassKind", "SimulatedRow", "ScheduledPass", "StepGraph"]

# [Note: order of sums]
# Whole backwards (B) and weight gradients (W) of a segment add to the same gradients. Floating point sums depend on the
# order, so B and W of one segment always run in the order of the microbatches, whatever else moves. Hence `parted`
# splits only the last backwards of a segment, and `whole` makes only the first ones whole again. So the sums of every
# schedule are bit for bit those of a single process; `check_plan` verifies the order.

# A segment without compute (it only forwards or reads a value) still takes its turn.
SMALLEST_COST = 1e-9

PassKind = Literal["F", "B", "I", "W"]


class ScheduledPass(NamedTuple):
    """One pass in the order of a stage."""

    kind: PassKind
    segment: int
    """Index among all segments."""
    microbatch: int


Orders = Sequence[Sequence[ScheduledPass]]
"""Passes of each stage, in order."""


@final
class StepGraph:
    """Passes of a step with their costs and dependencies.

    Args:
        flow: Segments of one microbatch and their dependencies.
        num_microbatches: Microbatches of the step.
        link: Latency and bandwidth of messages.
        split_overhead: Overhead of an input gradient that is computed alone, as a share of the whole backward.

    Attributes:
        is_awaited: Per segment, whether another pass depends on its backward. On the last segment of backward only
            the optimizer does.
        can_split: Per segment, whether its backward has a part that is awaited and one that is not.
        needs: Per track, the tracks that must come before in the same microbatch, with the delay after their end.
        tables: Per kind of pass and segment: seconds, track, needs of the track.
        visits: Per stage, its segments in groups without a remote dependency on the group's own results. On a chain
            of chunks these are the chunks.
    """

    def __init__(self, flow: Flow, num_microbatches: int, link: Link, split_overhead: float) -> None:
        self.num_stages = flow.num_stages
        self.num_microbatches = num_microbatches
        self.segments = list(flow.work)
        number_of = {segment: number for number, segment in enumerate(self.segments)}
        self.of_stage: list[list[int]] = [[] for _ in range(flow.num_stages)]
        for segment in sorted(self.segments):
            self.of_stage[segment.stage].append(number_of[segment])
        self.has_backward = [segment in flow.backward_needs for segment in self.segments]
        work = list(flow.work.values())
        awaited = {need for needs in flow.backward_needs.values() for need in needs}
        self.is_awaited = [segment in awaited for segment in self.segments]
        self.can_split = [
            is_awaited and cost.weight_gradient > 0 for is_awaited, cost in zip(self.is_awaited, work, strict=True)
        ]
        self._costs = {
            "F": [max(cost.forward, SMALLEST_COST) for cost in work],
            "B": [max(cost.backward, SMALLEST_COST) for cost in work],
            "I": [max(cost.input_gradient + split_overhead * cost.backward, SMALLEST_COST) for cost in work],
            "W": [max(cost.weight_gradient, SMALLEST_COST) for cost in work],
        }
        self.needs = self._all_needs(flow, number_of, link)
        self.tables = {
            kind: [
                (cost, self.track(kind, number), self.needs[self.track(kind, number)])
                for number, cost in enumerate(costs)
            ]
            for kind, costs in self._costs.items()
        }
        # A search makes thousands of orders of the same passes, so each pass is one object.
        self._passes: dict[tuple[str, int], list[ScheduledPass]] = {}
        self._ancestors = [-1] * len(self.segments)
        self.visits = [self._visits_of(stage) for stage in range(flow.num_stages)]

    def _all_needs(self, flow: Flow, number_of: dict[SegmentId, int], link: Link) -> list[list[tuple[int, float]]]:
        count = len(self.segments)
        needs: list[list[tuple[int, float]]] = [[] for _ in range(3 * count)]

        def arrivals(target: SegmentId, sources: dict[SegmentId, int], offset: int) -> list[tuple[int, float]]:
            return [
                (offset + number_of[source], link.seconds(nbytes) if source.stage != target.stage else 0.0)
                for source, nbytes in sources.items()
            ]

        for number, segment in enumerate(self.segments):
            needs[number] = arrivals(segment, dict(flow.forward_needs[segment]), 0)
            if self.has_backward[number]:
                # Backward begins when the stage has finished the whole forward of the microbatch, and goes down.
                mine = self.of_stage[segment.stage]
                later = [other for other in mine if self.segments[other].number > segment.number]
                above = [(count + other, 0.0) for other in later if self.has_backward[other]][:1]
                needs[count + number] = [(mine[-1], 0.0), *above]
                needs[count + number] += arrivals(segment, dict(flow.backward_needs[segment]), count)
                needs[2 * count + number] = [(count + number, 0.0)]
        return needs

    def cost(self, kind: str, segment: int) -> float:
        """Seconds of one pass."""
        return self._costs[kind][segment]

    @property
    def halvings(self) -> list[int]:
        """Numbers of microbatches for a search by halving: all, half of them, and so on down to one."""
        return [self.num_microbatches >> power for power in range(self.num_microbatches.bit_length())]

    def passes(self, kind: PassKind, segment: int) -> list[ScheduledPass]:
        found = self._passes.get((kind, segment))
        if found is None:
            found = [ScheduledPass(kind, segment, microbatch) for microbatch in range(self.num_microbatches)]
            self._passes[kind, segment] = found
        return found

    def track(self, kind: str, segment: int) -> int:
        return segment + len(self.segments) * (0 if kind == "F" else 2 if kind == "W" else 1)

    def _visits_of(self, stage: int) -> list[list[int]]:
        visits: list[list[int]] = []
        for number in self.of_stage[stage]:
            remote = [need for need, _ in self.needs[number] if self.segments[need].stage != stage]
            if not visits or any((self._before(need) | 1 << need) & _mask(visits[-1]) for need in remote):
                visits.append([])
            visits[-1].append(number)
        return visits

    def _before(self, number: int) -> int:
        """All segments that come before segment ``number``, as bits."""
        if self._ancestors[number] < 0:
            found = 0
            for need, _ in self.needs[number]:
                found |= 1 << need | self._before(need)
            self._ancestors[number] = found
        return self._ancestors[number]

    def least_makespan(self, *, splits: bool, at_once: bool = True, steps: int = 1) -> float:
        """Lower bound on the makespan: way to the first work of a stage, all of its work, way back from it.

        Args:
            splits: Whether weight gradients may be computed after everything else.
            at_once: Whether backwards may be whole for free; otherwise all are split and pay the overhead.
            steps: Number of steps in a row.
        """
        count = len(self.segments)
        cost = [*self._costs["F"], *self._costs["B"], *([0.0] * count)]
        if splits:
            for number in range(count):
                if self.can_split[number]:
                    cost[2 * count + number] = self._costs["W"][number]
                    alone = self._costs["I"][number]
                    cost[count + number] = cost[count + number] - cost[2 * count + number] if at_once else alone
        starts, tails = self._longest_ways(cost)
        bounds = [start + cost[track] + tails[track] for track, start in starts.items()]
        for stage in self.of_stage:
            forwards, backwards = stage, [count + number for number in stage if self.has_backward[number]]
            if not forwards:
                continue
            head = starts[forwards[0]]
            urgent = self.num_microbatches * sum(cost[track] for track in [*forwards, *backwards])
            late = self.num_microbatches * sum(cost[track + count] for track in backwards)
            tail = min([tails[track] for track in backwards or forwards])
            bounds.append(head + (steps - 1) * (urgent + late) + urgent + max(late, tail))
        return max(bounds, default=0.0)

    def _longest_ways(self, cost: Sequence[float]) -> tuple[dict[int, float], list[float]]:
        """Longest paths of a single microbatch: to the start of each track, and from its end."""
        starts: dict[int, float] = {}

        def start(track: int) -> float:
            if track not in starts:
                starts[track] = max(
                    [start(need) + cost[need] + delay for need, delay in self.needs[track]], default=0.0
                )
            return starts[track]

        count = len(self.segments)
        for track in range(3 * count):
            if track < count or self.has_backward[track % count]:
                start(track)
        tails = [0.0] * (3 * count)
        for track in sorted(starts, key=starts.__getitem__, reverse=True):
            for need, delay in self.needs[track]:
                tails[need] = max(tails[need], delay + cost[track] + tails[track])
        return starts, tails

    # From tables to orders

    def orders_of(self, plan: Plan) -> list[list[ScheduledPass]]:
        return [
            [self.passes(action.kind, self.of_stage[stage][action.segment])[action.microbatch] for action in actions]
            for stage, actions in enumerate(plan.stages)
        ]

    def expand(self, tables: Sequence[Sequence[ChunkPass]], *, turns: bool = False) -> Orders | None:
        """Published tables as orders of this graph; ``None`` if the visits of a stage are not its chunks.

        Args:
            tables: Passes of the chunks of each stage, in order.
            turns: Whether the chunks form a V, so that both chunks of the stage at its turning point are one visit.
        """
        orders = [
            self._expand(stage, self._at_turn(table) if turns and len(self._chunks_of(stage)) == 1 else table)
            for stage, table in enumerate(tables)
        ]
        return None if any(order is None for order in orders) else [order or [] for order in orders]

    def _chunks_of(self, stage: int) -> list[list[int]]:
        """Visits of ``stage`` up to the last one that has a backward."""
        visits = self.visits[stage]
        last = max((i for i, visit in enumerate(visits) if any(self.has_backward[n] for n in visit)), default=None)
        return visits if last is None else visits[: last + 1]

    @staticmethod
    def _at_turn(table: Sequence[ChunkPass]) -> list[ChunkPass]:
        """Table of the turning point: forward of the first chunk, backward of the second; others wait for both."""
        return [
            entry if entry.kind == "F" else entry._replace(chunk=0)
            for entry in table
            if (entry.kind == "F") == (entry.chunk == 0)
        ]

    def _expand(self, stage: int, table: Sequence[ChunkPass]) -> list[ScheduledPass] | None:
        chunks = self._chunks_of(stage)
        # Visits without a backward read the loss or its parts; they run right before the stage's backward.
        readings = [number for visit in self.visits[stage][len(chunks) :] for number in visit]
        found = {(entry.kind, entry.chunk) for entry in table}
        if len(chunks) != len({chunk for _, chunk in found}):
            return None

        def passes_of(kind: PassKind, chunk: int) -> list[list[ScheduledPass]]:
            if kind == "F":
                return [self.passes("F", number) for number in chunks[chunk]]
            read = readings if kind != "W" and chunk == len(chunks) - 1 else []
            return [self.passes("F", number) for number in read] + [
                self.passes(kind if self.can_split[number] else "B", number)
                for number in reversed(chunks[chunk])
                if self.has_backward[number] and (self.can_split[number] or kind != "W")
            ]

        passes = {each: passes_of(*each) for each in found}
        return [each[microbatch] for kind, chunk, microbatch in table for each in passes[kind, chunk]]

    def parted(self, order: Sequence[ScheduledPass], *, num_whole: int = 0) -> list[ScheduledPass]:
        """``order`` with every backward split that can be.

        Args:
            order: Passes of a stage.
            num_whole: Number of first microbatches whose backwards stay whole.
        """
        result: list[ScheduledPass] = []
        for entry in order:
            kind, segment, microbatch = entry
            if microbatch >= num_whole and kind == "B" and self.can_split[segment]:
                result += [self.passes("I", segment)[microbatch], self.passes("W", segment)[microbatch]]
            else:
                result.append(entry)
        return result

    def whole(self, order: Sequence[ScheduledPass], segment: int, count: int) -> list[ScheduledPass]:
        """``order`` with whole backwards of ``segment`` for the first ``count`` microbatches, at their ``I``."""
        result = []
        for entry in order:
            if entry.segment == segment and entry.microbatch < count and entry.kind in "IW":
                result += [self.passes("B", segment)[entry.microbatch]] * (entry.kind == "I")
            else:
                result.append(entry)
        return result

    def reachable(self, order: Sequence[ScheduledPass], position: int, target: int) -> int:
        """The place in ``order`` nearest to ``target`` that the pass at ``position`` reaches without overtaking a pass
        that it depends on, or one that depends on it."""
        entry, step = order[position], 1 if target > position else -1
        while position != target and not self._are_ordered(entry, order[position + step]):
            position += step
        return position

    def _are_ordered(self, entry: ScheduledPass, other: ScheduledPass) -> bool:
        if self.track(entry.kind, entry.segment) == self.track(other.kind, other.segment):
            return True
        if "W" in (entry.kind, other.kind) and entry.segment != other.segment:
            return False
        # See [Note: order of sums].
        return entry.microbatch == other.microbatch or (
            entry.segment == other.segment and {entry.kind, other.kind} == {"B", "W"}
        )

    def merged(self, orders: Orders, *, everywhere: bool) -> Orders:
        """``orders`` with a whole backward for each weight gradient that directly follows its input gradient.

        Args:
            orders: Passes of each stage.
            everywhere: Whether to merge also if another stage waits for the input gradient, and would wait longer.
        """
        awaited = {
            need
            for track, needs in enumerate(self.needs)
            for need, _ in needs
            if self.stage_of(need) != self.stage_of(track)
        }
        result = []
        for order in orders:
            merged: list[ScheduledPass] = []
            for entry in order:
                kind, segment, microbatch = entry
                if (
                    kind == "W"
                    and merged
                    and merged[-1] == ("I", segment, microbatch)
                    and (everywhere or self.track("I", segment) not in awaited)
                ):
                    merged[-1] = self.passes("B", segment)[microbatch]
                else:
                    merged.append(entry)
            result.append(merged)
        return result

    def stage_of(self, track: int) -> int:
        return self.segments[track % len(self.segments)].stage

    # From orders to times

    def follow(self, orders: Orders) -> Plan:
        """Plan of stages that run their passes in the given orders, each as early as possible."""
        return self.plan_of(self.follow_in_a_row(orders, 1))

    def follow_in_a_row(self, orders: Orders, steps: int) -> "SimulatedRow":
        """The same for ``steps`` steps in a row: a stage begins a step when it has ended the one before."""
        clock = _Clock(self, orders, [0.0] * self.num_stages)
        clock.run()
        makespan, times = max(clock.free_at, default=0.0), clock.times
        for _ in range(1, steps):
            clock = _Clock(self, clock.orders, clock.free_at)
            clock.run()
            times = [before + after for before, after in zip(times, clock.times, strict=True)]
        return SimulatedRow(clock.orders, times, makespan, max(clock.free_at, default=0.0))

    def plan_of(self, row: "SimulatedRow") -> Plan:
        numbers = [segment.number for segment in self.segments]
        count = self.num_microbatches
        actions = [
            tuple([_actions(kind, numbers[segment], count)[microbatch] for kind, segment, microbatch in order])
            for order in row.orders
        ]
        times = [tuple(spans[: len(order)]) for spans, order in zip(row.times, row.orders, strict=True)]
        return Plan(tuple(actions), tuple(times))


class SimulatedRow(NamedTuple):
    """Steps in a row as they are simulated."""

    orders: list[list[ScheduledPass]]
    """Passes of each stage in a step; deadlocks are repaired."""
    times: list[list[tuple[float, float]]]
    """Spans of each stage in all steps."""
    makespan: float
    """End of the first step."""
    end: float
    """End of the last step."""


@lru_cache(maxsize=64)
def _actions(kind: PassKind, segment: int, num_microbatches: int) -> list[Action]:
    return [Action(kind, microbatch, segment) for microbatch in range(num_microbatches)]


@final
class _Clock:
    """Simulated clock: stages run their orders, each from the moment at which it is free."""

    def __init__(self, graph: StepGraph, orders: Orders, free_at: Sequence[float]) -> None:
        self._graph = graph
        self.orders = [list(order) for order in orders]
        self._reached = [0] * graph.num_stages
        self.free_at = list(free_at)
        self.times: list[list[tuple[float, float]]] = [[] for _ in range(graph.num_stages)]
        self._ends: list[list[float | None]] = [[None] * graph.num_microbatches for _ in graph.needs]
        self._waiting: list[list[int]] = [[] for _ in graph.needs]

    def run(self) -> None:
        self._advance(list(range(self._graph.num_stages)))
        while any(reached < len(order) for reached, order in zip(self._reached, self.orders, strict=True)):
            self._advance([self._repair()])

    def _advance(self, stages: list[int]) -> None:
        """Run ``stages``, and those that wait for them, until all have to wait."""
        # Hot loop: it runs for every pass of every simulated schedule.
        tables, ends, waiting = self._graph.tables, self._ends, self._waiting
        while stages:
            stage = stages.pop()
            order, times, free_at = self.orders[stage], self.times[stage], self.free_at[stage]
            for kind, segment, microbatch in islice(order, self._reached[stage], None):
                cost, track, needs = tables[kind][segment]
                start = free_at
                for need, delay in needs:
                    end = ends[need][microbatch]
                    if end is None:
                        waiting[need].append(stage)
                        break
                    if end + delay > start:
                        start = end + delay
                else:
                    free_at = start + cost
                    ends[track][microbatch] = free_at
                    times.append((start, free_at))
                    if waiting[track]:
                        stages += waiting[track]
                        waiting[track] = []
                    continue
                break
            self._reached[stage], self.free_at[stage] = len(times), free_at

    def _ready(self, entry: ScheduledPass) -> float | None:
        """Time at which all inputs of a pass have arrived; ``None`` while one is not produced yet."""
        kind, segment, microbatch = entry
        ready = 0.0
        for need, delay in self._graph.needs[self._graph.track(kind, segment)]:
            end = self._ends[need][microbatch]
            if end is None:
                return None
            if end + delay > ready:
                ready = end + delay
        return ready

    def _repair(self) -> int:
        """Resolve a deadlock: move up the pass that can start first. Returns its stage."""
        found: list[tuple[float, int, int]] = []
        for stage, order in enumerate(self.orders):
            seen: set[int] = set()
            for position in range(self._reached[stage], len(order)):
                entry = order[position]
                track = self._graph.track(entry.kind, entry.segment)
                ready = None if track in seen else self._ready(entry)
                seen.add(track)
                if ready is not None:
                    found.append((max(ready, self.free_at[stage]), stage, position))
                    break
        assert found, "the segments of the flow wait for each other"
        _, stage, position = min(found)
        order = self.orders[stage]
        order.insert(self._reached[stage], order.pop(position))
        return stage


def _mask(numbers: Sequence[int]) -> int:
    return sum(1 << number for number in numbers)
