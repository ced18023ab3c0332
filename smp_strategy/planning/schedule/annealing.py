"""Better orders for a step by simulated annealing (Kirkpatrick, Gelatt and Vecchi, Science 220, 1983).

Where stages share cores, a timetable is seldom bound by one chain of passes: what counts is how long how few of them
compute, and how many backwards are split for that. Local search, which moves what is critical, ends there in one of
many orders, by chance a good one. Here any pass is moved by a few places, or a backward split, or made whole; what
makes the timetable longer is accepted, too, the less probably the more it does so and the later it comes.

The random numbers are the same on every rank, so all find the same.
"""

import math
import random
from collections.abc import Sequence

from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.schedule.scoring import PlanScorer
from smp_strategy.planning.schedule.step_graph import ScheduledPass, StepGraph

__all__ = ["anneal"]

# Passes that are timed: a few seconds in all.
MOST_PASSES = 2_400_000
# What is accepted at the beginning with a probability of 1/e: by what share a timetable may be longer.
TEMPERATURE = 0.004
# How often a backward is split or made whole; otherwise a pass is moved, by so many places at most.
SHARE_OF_SPLITS = 0.15
MOST_PLACES = 4


def anneal(judge: PlanScorer, plan: Plan) -> Plan:
    """A better plan than ``plan``, or ``plan``.

    Args:
        judge: says what is better.
        plan: where the search begins; it is within the limits.
    """
    graph, numbers = judge.graph, random.Random(0)
    orders = graph.orders_of(plan)
    now = best = judge.timed(orders)
    bound = judge.bound(splits=True)
    num_trials = MOST_PASSES // max(1, judge.steps * sum(map(len, orders)))
    for trial in range(num_trials):
        if best.end <= bound:
            break
        stage = numbers.randrange(graph.num_stages)
        change = _split_or_whole if numbers.random() < SHARE_OF_SPLITS else _moved
        order = change(graph, orders[stage], numbers)
        if order == orders[stage]:
            continue
        after = judge.timed([*orders[:stage], order, *orders[stage + 1 :]])
        temperature = TEMPERATURE * best.end * (1 - trial / num_trials)
        is_accepted = after.end <= now.end or numbers.random() < math.exp((now.end - after.end) / temperature)
        if is_accepted and judge.allows(after.plan):
            now, orders = after, graph.orders_of(after.plan)  # that may have been repaired
            best = judge.better(now, best)
    return best.plan


def _moved(graph: StepGraph, order: Sequence[ScheduledPass], numbers: random.Random) -> list[ScheduledPass]:
    """``order`` with one pass some places from where it was, as far as it may go."""
    if not order:
        return []
    position = numbers.randrange(len(order))
    places = numbers.randrange(1, MOST_PLACES + 1) * numbers.choice((-1, 1))
    target = graph.reachable(order, position, min(max(position + places, 0), len(order) - 1))
    moved = list(order)
    moved.insert(target, moved.pop(position))
    return moved


def _split_or_whole(graph: StepGraph, order: Sequence[ScheduledPass], numbers: random.Random) -> list[ScheduledPass]:
    """``order`` with one backward of a segment more that is split, or one less.

    Sums of gradients keep their order if the first backwards of a segment are whole.
    """
    segments = sorted({entry.segment for entry in order if entry.kind == "I" or graph.is_splittable(entry)})
    if not segments:
        return list(order)
    segment = numbers.choice(segments)
    split = [entry.microbatch for entry in order if entry.kind == "W" and entry.segment == segment]
    first = min(split, default=graph.num_microbatches)
    if split and numbers.random() < 0.5:
        return graph.whole(order, segment, first + 1)
    return graph.parted(order, num_whole=first - 1, segment=segment)
