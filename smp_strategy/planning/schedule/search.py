"""The best timetable that can be found for a flow, under limits of memory: what ``auto`` does.

First the plans of all policies, then better orders of the best ones by local search. A plan is judged twice: by the end
of a step that is alone, and by that of several steps in a row (:mod:`smp_strategy.planning.schedule.steps_in_a_row`).
Often one of the orders that are best for a step alone is better than the others in a row, and that is taken.

Where times are measured, so that it is known how much passes vary, two things more are worth it. Plans are judged with
messages that come late: of those that are equally good if all goes as usual, some stop all stages as soon as one of
them is behind, and others do not notice. And the best order is annealed, for a few seconds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from smp_strategy.model.trace.work import Link
from smp_strategy.pipeline.schedule import Plan, crowded, end_of
from smp_strategy.planning.schedule.annealing import anneal
from smp_strategy.planning.schedule.fill_bubbles import fill_waits
from smp_strategy.planning.schedule.flow import Flow
from smp_strategy.planning.schedule.list_scheduling import Rules, list_schedule
from smp_strategy.planning.schedule.local_search import LocalSearch
from smp_strategy.planning.schedule.peak_memory import DEFAULT_HORIZON
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.scoring import Limits, PlanScorer, excess
from smp_strategy.planning.schedule.simulate import NEGLIGIBLE, SPLIT_OVERHEAD, simulate
from smp_strategy.planning.schedule.step_graph import Orders, StepGraph
from smp_strategy.planning.schedule.steps_in_a_row import STEPS, with_real_times

__all__ = ["NOTICEABLE", "SearchResult", "Losses", "search"]

# A simpler policy wins unless another is better by more than this share.
NOTICEABLE = 0.01


class SearchResult(NamedTuple):
    """A plan, and the policy that it was made from."""

    policy: Policy
    plan: Plan


class Losses(NamedTuple):
    """What makes work take longer than if it was whole, had a core of its own and was always as fast."""

    split: float = SPLIT_OVERHEAD
    """What a backward takes longer in two parts, as a share of it."""
    crowding: float = 1.0
    """How much longer all work takes while all stages do some, because they share cores."""
    spread: float = 0.0
    """The standard deviation of what a pass takes, as a share of it."""


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
) -> SearchResult:
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
        It, with the times that it takes on shared cores if all passes take as long as usual.
    """
    limits = Limits(tuple(most_bytes) or (None,) * flow.num_stages, active_microbatches, horizon)
    late = link._replace(latency=link.latency + _lateness(flow, num_microbatches, losses.spread))
    found = [
        SearchResult(policy, simulate(flow, num_microbatches, policy, late, split_overhead=losses.split, thorough=True))
        for policy in policies
    ]
    too_much = [excess(each.plan, flow, limits) for each in found]
    found = [each for each, much in zip(found, too_much, strict=True) if much == min(too_much)]
    best = found[0]
    if min(too_much) == 0:
        best = _best(StepGraph(flow, num_microbatches, late, losses.split), flow, limits, found, losses)
    graph = StepGraph(flow, num_microbatches, link, losses.split)
    return SearchResult(best.policy, with_real_times(graph.follow(graph.orders_of(best.plan)), graph, losses.crowding))


def _lateness(flow: Flow, num_microbatches: int, spread: float) -> float:
    """How late a message may be, in seconds: the standard deviation of what the passes of a stage take in a step.

    They vary independently of each other, so their variances add up.
    """
    variances = [0.0] * flow.num_stages
    for segment, work in flow.work.items():
        variances[segment.stage] += num_microbatches * ((spread * work.forward) ** 2 + (spread * work.backward) ** 2)
    return math.sqrt(max(variances))


def _best(graph: StepGraph, flow: Flow, limits: Limits, found: Sequence[SearchResult], losses: Losses) -> SearchResult:
    """A plan that is in ``found``, or a better one.

    Args:
        graph: the passes of the step.
        flow: what it was made of.
        limits: what a plan must keep to.
        found: plans of policies that do, the simpler ones first.
        losses: what work takes longer.
    """
    improved: dict[bool, SearchResult] = {}
    for splits in (False, True):
        # A backward can be split under any policy.
        mine = [each for each in found if splits or not each.policy.splits_backward]
        if mine:
            mine.sort(key=lambda each: end_of(crowded(each.plan.times, losses.crowding)))
            plans = [each.plan for each in (*improved.values(), *mine)]
            improved[splits] = SearchResult(
                mine[0].policy, _improved(graph, flow, limits, plans, losses, splits=splits)
            )
    if losses.spread:
        improved[True] = _annealed(graph, flow, limits, improved, losses)
    return _simplest(graph, found, improved, losses.crowding)


def _annealed(
    graph: StepGraph, flow: Flow, limits: Limits, improved: Mapping[bool, SearchResult], losses: Losses
) -> SearchResult:
    """What annealing makes of the best in ``improved``: worth its seconds where times are measured."""
    soonest = min(end_of(crowded(each.plan.times, losses.crowding)) for each in improved.values())
    latest = soonest * (1 + NOTICEABLE)
    judge = PlanScorer(graph, flow, limits, crowding=losses.crowding, steps=STEPS, latest=latest)
    best = min([each.plan for each in improved.values()], key=lambda plan: judge.timed(graph.orders_of(plan)).end)
    return SearchResult(improved[True].policy, anneal(judge, best))


def _improved(
    graph: StepGraph, flow: Flow, limits: Limits, plans: Sequence[Plan], losses: Losses, *, splits: bool
) -> Plan:
    """The best order that local search finds, for a step that is alone, and then for steps in a row.

    Args:
        graph: the passes of the step.
        flow: what it was made of.
        limits: what a plan must keep to.
        plans: those that there are, the best first.
        losses: what work takes longer.
        splits: whether backwards may be split.
    """
    judge = partial(PlanScorer, graph, flow, limits, crowding=losses.crowding)
    beginnings = partial(_beginnings, graph, active=limits.active_microbatches, splits=splits)
    best = LocalSearch(judge(), splits=splits).improve(plans[0], beginnings(plans))
    latest = end_of(crowded(best.times, losses.crowding)) * (1 + NOTICEABLE)
    in_a_row = judge(steps=STEPS, latest=latest)
    return LocalSearch(in_a_row, splits=splits).improve(best, beginnings([best]))


def _beginnings(graph: StepGraph, plans: Sequence[Plan], *, active: int | None, splits: bool) -> Iterator[Orders]:
    """Where local search begins: orders of ``plans``, and some of list scheduling."""
    stages = graph.num_stages
    for plan in plans:
        orders = graph.orders_of(plan)
        if not splits:
            yield orders
            continue
        for num_split in graph.halvings:
            for impatience in (0.0, 0.5):
                num_whole = graph.num_microbatches - num_split
                yield fill_waits(graph, orders, impatience=impatience, num_whole=num_whole)
        yield [graph.parted(order) for order in orders]
    usual = Rules(splits=splits, most_microbatches=active)
    for patience in (0.0, 0.5, 1.0):
        yield list_schedule(graph, [usual._replace(patience=patience)] * stages)
    yield list_schedule(graph, [usual._replace(forward_first=True)] * stages)
    yield list_schedule(graph, [usual._replace(most_microbatches=stages - stage) for stage in range(stages)])


def _simplest(
    graph: StepGraph, found: Sequence[SearchResult], improved: Mapping[bool, SearchResult], crowding: float
) -> SearchResult:
    """What is as good as the best, or nearly, and simpler: first for a step that is alone, then for steps in a row.

    Args:
        graph: the passes of the step.
        found: plans of policies, the simpler ones first.
        improved: better orders, with and without split backwards.
        crowding: how much longer work takes while all stages do some.

    Returns:
        It, with the times that it takes on shared cores.
    """
    rated = [SearchResult(each.policy, with_real_times(each.plan, graph, crowding)) for each in found]
    better = {
        splits: SearchResult(each.policy, with_real_times(each.plan, graph, crowding))
        for splits, each in improved.items()
    }
    every = [*rated, *better.values()]
    fastest = min(each.plan.makespan for each in every)
    every = [each for each in every if each.plan.makespan * (1 - NOTICEABLE) <= fastest]
    fastest = min(_in_a_row(each.plan) for each in every)
    best = next(each for each in every if _in_a_row(each.plan) * (1 - NOTICEABLE) <= fastest)
    # A better order is as simple where backwards are split as they are anyway.
    other = better.get(best.policy.splits_backward, best)
    is_worth_it = _in_a_row(other.plan) < _in_a_row(best.plan) * (1 - NEGLIGIBLE)
    return SearchResult(best.policy, other.plan) if other in every and is_worth_it else best


def _in_a_row(plan: Plan) -> float:
    """Seconds of all steps that are timed in a row."""
    assert plan.period is not None
    return plan.makespan + (STEPS - 1) * plan.period
