"""Tabu search on the critical path: improves the order of passes of a schedule (Nowicki and Smutnicki, 1996).

The end of a schedule is the length of a chain of passes without a gap, the *critical path*, and only a change of order
within a stage's block of it can make the schedule shorter. So a pass is moved to the beginning or the end of its block,
or by one place, as long as that helps, and a few times more (Management Science 42(6), for job shops). There are no
random numbers: all ranks find the same.

The objective is the end of a number of steps in a row (:mod:`smp_strategy.planning.schedule.scoring`). A move applies
to all of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import final

from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.schedule.scoring import TOLERANCE, PlanScorer, Timed
from smp_strategy.planning.schedule.step_graph import Orders, ScheduledPass

__all__ = ["LocalSearch"]

# Budget of one search in simulated passes, per step in a row: a fraction of a second in all. A step of which it could
# not try even two orders stays as it is. See [Note: same decision on every rank].
MOST_PASSES = 200_000
# Moves without a gain before the search gives up, and moves for which a moved pass stays in place.
MOST_BAD_MOVES = 12
TABU_MOVES = 6


@final
class LocalSearch:
    """Tabu search for better orders, with a budget of simulated passes that all its calls share.

    Args:
        scorer: Objective and limits.
        splits: Whether weight gradients may be passes of their own.
    """

    def __init__(self, scorer: PlanScorer, *, splits: bool) -> None:
        self._scorer = scorer
        self._graph = scorer.graph
        self._bound = scorer.bound(splits=splits)
        self._passes_left = MOST_PASSES * scorer.steps

    def improve(self, plan: Plan, *beginnings: Iterable[Orders]) -> Plan:
        """The best plan found from starting orders, or ``plan`` if none is better.

        Args:
            plan: Known plan.
            beginnings: Starting orders in groups. The first ones are tried first, and if several are equally good,
                those of the last group.
        """
        if sum(map(len, plan.stages)) > MOST_PASSES // 2:
            return plan
        best = self._scorer.timed(self._graph.orders_of(plan))
        rated: list[tuple[float, int, int, Timed]] = []
        # Half of the budget is for the starting orders.
        enough = self._passes_left // 2
        for number, group in enumerate(beginnings if best.end > self._bound else ()):
            for orders in group if self._passes_left > enough else ():
                timed = self._follow(orders)
                rated.append((timed.end, -number, len(rated), timed))
                if self._passes_left <= enough:
                    break
        rated.sort(key=lambda each: each[:3])
        for *_, timed in rated[:1]:
            best = self._better(timed, best)
        for *_, timed in rated:
            if best.end <= self._bound or self._passes_left <= 0:
                break
            improved = self._descend(timed)
            if improved is not None:
                best = self._better(improved, best)
        return self._graph.plan_of(self._with_whole_backwards(best).row)

    def _better(self, found: Timed, best: Timed) -> Timed:
        """The better one of ``best`` and ``found``, as it is or with whole backwards where no other pass intervenes."""
        known: list[tuple[Orders, Timed]] = [(found.row.orders, found)]
        for everywhere in (True, False):
            orders = self._graph.merged(found.row.orders, everywhere=everywhere)
            timed = next((timed for before, timed in known if before == orders), None) or self._follow(orders)
            known.append((orders, timed))
            best = self._scorer.better(timed, best)
        return best

    def _with_whole_backwards(self, best: Timed) -> Timed:
        """``best`` with fewer split backwards, as long as it ends no later: splits cost work.

        The first backwards of a segment become whole, the last ones stay split: see [Note: order of sums].
        """
        orders = best.row.orders
        self._passes_left = MOST_PASSES * self._scorer.steps  # a budget of its own
        for stage, order in enumerate(orders):
            for segment in sorted({entry.segment for entry in order if entry.kind == "W"}):
                for count in self._graph.halvings:
                    if self._passes_left <= 0:
                        return best
                    whole = self._graph.whole(orders[stage], segment, count)
                    after = self._follow([*orders[:stage], whole, *orders[stage + 1 :]])
                    if after.end <= best.end and not after.is_late and self._scorer.allows(after):
                        best, orders = after, after.row.orders
                        break
        return best

    def _descend(self, start: Timed) -> Timed | None:
        """Take the best move each time, even a bad one, but never move a pass again that was just moved.

        Returns:
            The best plan on the way; ``None`` if the one of ``start`` exceeds the limits.
        """
        now = best = start
        orders = now.row.orders
        if not self._scorer.allows(now):
            return None
        moved: list[ScheduledPass] = []
        since = 0
        while best.end > self._bound and self._passes_left > 0 and since < MOST_BAD_MOVES:
            options: list[tuple[float, int, Timed, ScheduledPass]] = []
            for stage, entry, order in self._moves(now, orders):
                if self._passes_left <= 0:
                    break
                neighbour = self._follow([*orders[:stage], order, *orders[stage + 1 :]])
                is_better = neighbour.end < best.end * (1 - TOLERANCE)  # aspiration: a new best overrides the tabu
                if (is_better or entry not in moved[-TABU_MOVES:]) and self._scorer.allows(neighbour):
                    options.append((neighbour.end, len(options), neighbour, entry))
            if not options:
                break
            _, _, now, entry = min(options, key=lambda option: option[:2])
            orders = now.row.orders  # not the moved ones: a deadlock may have been repaired
            moved.append(entry)
            since += 1
            if now.end < best.end * (1 - TOLERANCE):
                best, since = now, 0
        return best

    def _follow(self, orders: Orders) -> Timed:
        self._passes_left -= self._scorer.steps * sum(map(len, orders))
        return self._scorer.timed(orders)

    def _moves(
        self, timed: Timed, orders: list[list[ScheduledPass]]
    ) -> Iterator[tuple[int, ScheduledPass, list[ScheduledPass]]]:
        """Neighbours: orders of one stage with one critical pass at another place."""
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
        """Stage and position in the row of the passes on the critical path, up to the last one."""
        graph, row = self._graph, timed.row.times
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
    """Blocks of the critical path: stage, first and last position of each run on one stage within one step.

    Args:
        path: Stages with positions in a row of steps.
        lengths: Number of passes of each stage in a step.
    """
    blocks: list[list[int]] = []
    for stage, place in path:
        position = place % lengths[stage]
        if position and blocks and blocks[-1][0] == stage and blocks[-1][2] == position - 1:
            blocks[-1][2] = position
        else:
            blocks.append([stage, position, position])
    return blocks
