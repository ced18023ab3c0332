"""Better orders for a step whose timetable is known, by small changes.

The end of a timetable is the length of a chain of passes without a gap in it, the *critical path*, and only a change of
order within a stage's part of it can bring it forward. So a pass is moved to the beginning or the end of its part, or
by one place, as long as that helps, and a few times more (tabu search in the manner of Nowicki and Smutnicki,
Management Science 42(6), 1996, for job shops). No random numbers: all ranks find the same.

What counts is the end of a number of steps in a row (:mod:`smp_strategy.planning.schedule.scoring`). A pass that is
moved is moved in all of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import final

from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.schedule.scoring import TOLERANCE, PlanScorer, Timed
from smp_strategy.planning.schedule.step_graph import Orders, ScheduledPass

__all__ = ["LocalSearch"]

# Passes that one search may time, for each step in a row: a fraction of a second in all.
MOST_PASSES = 200_000
# Moves without a gain before local search gives up, and for how many of them a pass stays where it was moved.
MOST_BAD_MOVES = 12
TABU_MOVES = 6


@final
class LocalSearch:
    """See the module docstring.

    Args:
        judge: says what is better.
        splits: whether weight gradients may be passes of their own.
    """

    def __init__(self, judge: PlanScorer, *, splits: bool) -> None:
        self._judge = judge
        self._graph = judge.graph
        self._bound = judge.bound(splits=splits)
        self._passes_left = MOST_PASSES * judge.steps

    def improve(self, plan: Plan, beginnings: Iterable[Orders]) -> Plan:
        """The best that is found from ``beginnings``, or ``plan``, if there is nothing better."""
        best = self._judge.timed(self._graph.orders_of(plan))
        if best.end <= self._bound:
            beginnings = ()
        # The most promising first: there may not be time for all of them.
        for orders in sorted(beginnings, key=lambda orders: self._follow(orders).end):
            if best.end <= self._bound or self._passes_left <= 0:
                break
            improved = self._descend(orders)
            if improved is not None:
                orders = self._graph.orders_of(improved.plan)
                for everywhere in (True, False):
                    merged = self._follow(self._graph.merged(orders, everywhere=everywhere))
                    best = self._judge.better(merged, best)
        return self._with_whole_backwards(best).plan

    def _with_whole_backwards(self, best: Timed) -> Timed:
        """``best`` with fewer split backwards, where it ends no later without them: splits cost work.

        Sums of gradients keep their order if the first backwards of a segment are whole.
        """
        orders = self._graph.orders_of(best.plan)
        for stage, order in enumerate(orders):
            for segment in sorted({entry.segment for entry in order if entry.kind == "W"}):
                for count in self._graph.halvings:
                    whole = self._graph.whole(orders[stage], segment, count)
                    after = self._follow([*orders[:stage], whole, *orders[stage + 1 :]])
                    if after.end <= best.end and not after.is_late and self._judge.allows(after.plan):
                        best, orders = after, self._graph.orders_of(after.plan)
                        break
        return best

    def _descend(self, orders: Orders) -> Timed | None:
        """Tabu search: the best move each time, also a bad one, but no pass again that has just been moved.

        Returns:
            The best on the way; ``None`` where ``orders`` do not fit.
        """
        now = best = self._follow(orders)
        orders = self._graph.orders_of(now.plan)
        if not self._judge.allows(now.plan):
            return None
        moved: list[ScheduledPass] = []
        since = 0
        while best.end > self._bound and self._passes_left > 0 and since < MOST_BAD_MOVES:
            options: list[tuple[float, int, Timed, ScheduledPass]] = []
            for stage, entry, order in self._moves(now, orders):
                neighbour = self._follow([*orders[:stage], order, *orders[stage + 1 :]])
                is_better = neighbour.end < best.end * (1 - TOLERANCE)
                if (is_better or entry not in moved[-TABU_MOVES:]) and self._judge.allows(neighbour.plan):
                    options.append((neighbour.end, len(options), neighbour, entry))
            if not options:
                break
            _, _, now, entry = min(options, key=lambda option: option[:2])
            orders = self._graph.orders_of(now.plan)  # that may have been repaired
            moved.append(entry)
            since += 1
            if now.end < best.end * (1 - TOLERANCE):
                best, since = now, 0
        return best

    def _follow(self, orders: Orders) -> Timed:
        self._passes_left -= self._judge.steps * sum(map(len, orders))
        return self._judge.timed(orders)

    def _moves(
        self, timed: Timed, orders: list[list[ScheduledPass]]
    ) -> Iterator[tuple[int, ScheduledPass, list[ScheduledPass]]]:
        """Orders of one stage with one critical pass at another place."""
        seen: set[tuple[int, int, int]] = set()
        for stage, first, last in _blocks(self._critical_path(timed, orders), [len(order) for order in orders]):
            for position in range(first, last + 1):
                for target in (first, position - 1, last):
                    place = self._graph.reachable(orders[stage], position, target)
                    if first <= target <= last and place != position and (stage, position, place) not in seen:
                        seen.add((stage, position, place))
                        order = list(orders[stage])
                        order.insert(place, order.pop(position))
                        yield stage, orders[stage][position], order

    def _critical_path(self, timed: Timed, orders: list[list[ScheduledPass]]) -> list[tuple[int, int]]:
        """Stage and position in the row of passes that follow each other without a gap, up to the last one."""
        graph, row = self._graph, timed.row
        places: dict[tuple[int, int], tuple[int, int]] = {}
        for stage, order in enumerate(orders):
            for position, (kind, segment, microbatch) in enumerate(order):
                places[graph.track(kind, segment), microbatch] = (stage, position)
        stage = max(range(len(row)), key=lambda stage: row[stage][-1][1] if row[stage] else 0.0)
        position = len(row[stage]) - 1
        path = []
        while True:
            path.append((stage, position))
            start = row[stage][position][0]
            if position and _same(row[stage][position - 1][1], start):
                position -= 1
                continue
            step, position = divmod(position, len(orders[stage]))
            kind, segment, microbatch = orders[stage][position]
            for need, delay in graph.needs[graph.track(kind, segment)]:
                place, before = places[need, microbatch]
                before += step * len(orders[place])
                if _same(row[place][before][1] + delay, start):
                    stage, position = place, before
                    break
            else:
                return path[::-1]


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(one, other)


def _blocks(path: Sequence[tuple[int, int]], lengths: Sequence[int]) -> list[list[int]]:
    """Stage, first and last position of each run of passes on a stage and within a step.

    Args:
        path: stages with positions in a row of steps.
        lengths: passes of each stage in a step.
    """
    blocks: list[list[int]] = []
    for stage, place in path:
        position = place % lengths[stage]
        if position and blocks and blocks[-1][0] == stage and blocks[-1][2] == position - 1:
            blocks[-1][2] = position
        else:
            blocks.append([stage, position, position])
    return blocks
