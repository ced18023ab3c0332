"""The best timetable that can be found for a flow, under limits of memory: what ``auto`` does.

First the plans of all policies. Then the order of the best ones is improved by local search: the makespan is the
length of a chain of passes without a gap in it, the *critical path*, and only a change of order within a stage's part
of it can shorten it. So a pass is moved to the beginning or the end of its part, or by one place, as long as that
helps, and a few times more (tabu search in the manner of Nowicki and Smutnicki, Management Science 42(6), 1996, for job
shops). No random numbers: all ranks find the same.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from smp_strategy.pipeline.filling import fill_waits
from smp_strategy.pipeline.list_scheduling import Rules, list_schedule
from smp_strategy.pipeline.peaks import DEFAULT_HORIZON, peak_saved_bytes
from smp_strategy.pipeline.policies import Policy
from smp_strategy.pipeline.routing import Flow
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.pipeline.simulate import NEGLIGIBLE, SPLIT_OVERHEAD, simulate
from smp_strategy.pipeline.step_graph import Entry, StepGraph
from smp_strategy.trace.work import Link

__all__ = ["NOTICEABLE", "Found", "Losses", "search"]

# A simpler policy wins unless another is better by more than this share.
NOTICEABLE = 0.01
# Passes that local search may time, a fraction of a second in all.
MOST_PASSES = 200_000
# Moves without a gain before local search gives up, and for how many of them a pass stays where it was moved.
MOST_BAD_MOVES = 12
TABU_MOVES = 6
# Times that differ by less are the same but for rounding.
TOLERANCE = 1e-9


class Found(NamedTuple):
    """A plan, and the policy that it was made from."""

    policy: Policy
    plan: Plan


class Losses(NamedTuple):
    """What makes work take longer than if it was whole and had a core of its own."""

    split: float = SPLIT_OVERHEAD
    """What a backward takes longer in two parts, as a share of it."""
    crowding: float = 1.0
    """How much longer all work takes while all stages do some, because they share cores."""


def search(
    flow: Flow,
    num_microbatches: int,
    policies: Sequence[Policy],
    link: Link = Link.instant(),  # noqa: B008  (a named tuple cannot change)
    *,
    most_bytes: Sequence[int | None] = (),
    active_microbatches: int | None = None,
    losses: Losses = Losses(),  # noqa: B008
    horizon: int = DEFAULT_HORIZON,
) -> Found:
    """The fastest plan that fits; a simpler one where the difference is not worth it.

    Args:
        flow: segments of one microbatch and their dependencies.
        num_microbatches: microbatches of the step.
        policies: what may be used, the simpler ones first.
        link: how long messages are under way.
        most_bytes: most bytes of activations on each stage; empty: there are no limits. If nothing fits, the plan is
            that which exceeds them least.
        active_microbatches: most microbatches in flight on a stage.
        losses: what work takes longer than alone and whole.
        horizon: how far ahead of its use something comes back from host memory.

    Returns:
        It, with the times that it takes on shared cores.
    """
    limits = tuple(most_bytes) or (None,) * flow.num_stages
    found = [
        Found(policy, simulate(flow, num_microbatches, policy, link, split_overhead=losses.split, thorough=True))
        for policy in policies
    ]
    excess = [_excess(each.plan, flow, limits, horizon) for each in found]
    found = [each for each, much in zip(found, excess, strict=True) if much == min(excess)]
    if min(excess) > 0:
        return Found(found[0].policy, found[0].plan.crowded(losses.crowding))
    graph = StepGraph(flow, num_microbatches, link, losses.split)
    improved: dict[bool, Found] = {}
    for splits in (False, True):
        # A backward can be split under any policy.
        mine = [each for each in found if splits or not each.policy.splits_backward]
        if mine:
            mine.sort(key=lambda each: each.plan.makespan)
            plan = _Improvement(graph, flow, limits, active_microbatches, splits, horizon).of(
                [each.plan for each in mine]
            )
            improved[splits] = Found(mine[0].policy, plan.crowded(losses.crowding))
    found = [Found(each.policy, each.plan.crowded(losses.crowding)) for each in found]
    every = [*found, *improved.values()]
    fastest = min(each.plan.makespan for each in every)
    simplest = next(each for each in every if each.plan.makespan * (1 - NOTICEABLE) <= fastest)
    # A better order for the same policy is as simple.
    better = improved.get(simplest.policy.splits_backward, simplest)
    is_worth_it = better.plan.makespan < simplest.plan.makespan * (1 - NEGLIGIBLE)
    return better if better.policy == simplest.policy and is_worth_it else simplest


def _excess(plan: Plan, flow: Flow, limits: Sequence[int | None], horizon: int) -> int:
    peaks = peak_saved_bytes(plan, flow, horizon)
    return max(
        [max(0, peak - limit) for peak, limit in zip(peaks, limits, strict=True) if limit is not None], default=0
    )


@final
class _Improvement:
    """Local search on the orders of a step."""

    def __init__(
        self,
        graph: StepGraph,
        flow: Flow,
        limits: Sequence[int | None],
        active: int | None,
        splits: bool,
        horizon: int,
    ) -> None:
        self._graph = graph
        self._flow = flow
        self._limits = limits
        self._active = active
        self._splits = splits
        self._horizon = horizon
        self._passes_left = MOST_PASSES

    def of(self, plans: Sequence[Plan]) -> Plan:
        """The best plan that local search finds, from ``plans``, best first, and from some of list scheduling."""
        bound = self._graph.least_makespan(splits=self._splits) * (1 + TOLERANCE)
        best = plans[0]
        for orders in self._beginnings(plans):
            if best.makespan <= bound or self._passes_left <= 0:
                break
            improved = self._descend(orders, bound)
            if improved is None:
                continue
            orders = self._graph.orders_of(improved)
            for everywhere in (True, False):
                merged = self._graph.follow(self._graph.merged(orders, everywhere=everywhere))
                if merged.makespan < best.makespan * (1 - TOLERANCE) and self._fits(merged):
                    best = merged
        return best

    def _beginnings(self, plans: Sequence[Plan]) -> Iterator[list[list[Entry]]]:
        graph, stages = self._graph, self._graph.num_stages
        for plan in plans:
            orders = graph.orders_of(plan)
            if not self._splits:
                yield orders
                continue
            for impatience in (0.0, 0.5):
                yield fill_waits(graph, orders, impatience=impatience)
            yield [graph.parted(order) for order in orders]
        usual = Rules(splits=self._splits, most_microbatches=self._active)
        for patience in (0.0, 0.5, 1.0):
            yield list_schedule(graph, [usual._replace(patience=patience)] * stages)
        yield list_schedule(graph, [usual._replace(forward_first=True)] * stages)
        yield list_schedule(graph, [usual._replace(most_microbatches=stages - stage) for stage in range(stages)])

    def _fits(self, plan: Plan) -> bool:
        stages = range(self._graph.num_stages)
        if self._active is not None and any(plan.peak_microbatches(stage) > self._active for stage in stages):
            return False
        return all(limit is None for limit in self._limits) or not _excess(
            plan, self._flow, self._limits, self._horizon
        )

    def _descend(self, orders: list[list[Entry]], bound: float) -> Plan | None:
        """Tabu search: the best move each time, also a bad one, but no pass again that has just been moved.

        Returns:
            The best plan on the way; ``None`` where ``orders`` do not fit.
        """
        plan = best = self._time(orders)
        if not self._fits(plan):
            return None
        moved: list[Entry] = []
        since = 0
        while best.makespan > bound and self._passes_left > 0 and since < MOST_BAD_MOVES:
            options: list[tuple[float, int, Plan, list[list[Entry]], Entry]] = []
            for stage, entry, order in self._moves(plan, orders):
                changed = [*orders[:stage], order, *orders[stage + 1 :]]
                neighbour = self._time(changed)
                is_better = neighbour.makespan < best.makespan * (1 - TOLERANCE)
                if (is_better or entry not in moved[-TABU_MOVES:]) and self._fits(neighbour):
                    options.append((neighbour.makespan, len(options), neighbour, changed, entry))
            if not options:
                break
            _, _, plan, orders, entry = min(options, key=lambda option: option[:2])
            moved.append(entry)
            since += 1
            if plan.makespan < best.makespan * (1 - TOLERANCE):
                best, since = plan, 0
        return best

    def _time(self, orders: list[list[Entry]]) -> Plan:
        self._passes_left -= sum(map(len, orders))
        return self._graph.follow(orders)

    def _moves(self, plan: Plan, orders: list[list[Entry]]) -> Iterator[tuple[int, Entry, list[Entry]]]:
        """Orders of one stage with one critical pass at another place."""
        for stage, first, last in _blocks(self._critical_path(plan, orders)):
            seen: set[tuple[int, int]] = set()
            for position in range(first, last + 1):
                for target in (first, position - 1, last):
                    place = self._reachable(orders[stage], position, target)
                    if first <= target <= last and place != position and (position, place) not in seen:
                        seen.add((position, place))
                        order = list(orders[stage])
                        order.insert(place, order.pop(position))
                        yield stage, orders[stage][position], order

    def _reachable(self, order: list[Entry], position: int, target: int) -> int:
        """The place nearest to ``target`` that a pass can have without overtaking what it must not."""
        entry, step = order[position], 1 if target > position else -1
        while position != target and not self._are_ordered(entry, order[position + step]):
            position += step
        return position

    def _are_ordered(self, entry: Entry, other: Entry) -> bool:
        if self._graph.track(entry.kind, entry.segment) == self._graph.track(other.kind, other.segment):
            return True
        if "W" in (entry.kind, other.kind) and entry.segment != other.segment:
            return False
        # Whole backwards and weight gradients of a segment share its sums.
        return entry.microbatch == other.microbatch or (
            entry.segment == other.segment and {entry.kind, other.kind} == {"B", "W"}
        )

    def _critical_path(self, plan: Plan, orders: list[list[Entry]]) -> list[tuple[int, int]]:
        """Stage and position of passes that follow each other without a gap, up to the last one."""
        graph, times = self._graph, plan.times
        places: dict[tuple[int, int], tuple[int, int]] = {}
        for stage, order in enumerate(orders):
            for position, (kind, segment, microbatch) in enumerate(order):
                places[graph.track(kind, segment), microbatch] = (stage, position)
        stage = max(range(len(times)), key=lambda stage: times[stage][-1][1] if times[stage] else 0.0)
        position = len(times[stage]) - 1
        path = []
        while True:
            path.append((stage, position))
            start = times[stage][position][0]
            if position and _same(times[stage][position - 1][1], start):
                position -= 1
                continue
            kind, segment, microbatch = orders[stage][position]
            for need, delay in graph.needs[graph.track(kind, segment)]:
                place = places[need, microbatch]
                if _same(times[place[0]][place[1]][1] + delay, start):
                    stage, position = place
                    break
            else:
                return path[::-1]


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(one, other)


def _blocks(path: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Stage, first and last position of each run of passes on a stage."""
    blocks: list[list[int]] = []
    for stage, position in path:
        if blocks and blocks[-1][0] == stage and blocks[-1][2] == position - 1:
            blocks[-1][2] = position
        else:
            blocks.append([stage, position, position])
    return blocks
