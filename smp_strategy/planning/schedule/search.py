"""Schedule search of ``pipeline=auto``: the fastest schedule of a flow under limits of memory.

The plans of all policies come first, then better orders of the best ones by local search. A plan is scored twice: by
the end of a single step, and by that of several steps in a row (:mod:`smp_strategy.planning.schedule.steps_in_a_row`).
Among orders that are equally good for a single step, the best one in a row is taken.

If times are measured, the variance of passes is known, and plans are scored with late messages: some orders stop all
stages as soon as one of them is behind, and others that are equally good on average do not.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from smp_strategy.model.trace.work import Link
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.garbage import collecting_paused
from smp_strategy.planning.schedule.flow import Flow
from smp_strategy.planning.schedule.list_scheduling import Rules, list_schedule
from smp_strategy.planning.schedule.local_search import LocalSearch
from smp_strategy.planning.schedule.peak_memory import DEFAULT_HORIZON
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.scoring import Limits, PlanScorer, excess
from smp_strategy.planning.schedule.simulate import NEGLIGIBLE, SPLIT_OVERHEAD, simulate
from smp_strategy.planning.schedule.step_graph import Orders, ScheduledPass, StepGraph
from smp_strategy.planning.schedule.steps_in_a_row import STEPS, with_period

__all__ = ["fill_waits", "NOTICEABLE", "SearchResult", "Losses", "search"]


# --- bubbles that are filled -----------------------------------------------------------------------------------------
# Bubble filling: moves weight gradients into the idle times of a given schedule.
#
# Only the optimizer waits for weight gradients. So forwards and input gradients keep their order, and whenever a stage
# would wait for its next pass, it computes weight gradients that are due. The rest comes at the end (as in torch's
# interleaved Zero Bubble).


def fill_waits(graph: StepGraph, orders: Orders, *, impatience: float, num_whole: int = 0) -> list[list[ScheduledPass]]:
    """``orders`` with split backwards whose weight gradients fill the bubbles.

    Args:
        graph: Dependencies and costs of the passes.
        orders: Passes of each stage.
        impatience: Share of a weight gradient that may delay the next pass.
        num_whole: Number of first microbatches whose backwards stay whole.
    """
    given = [
        deque(entry for entry in graph.parted(order, num_whole=num_whole) if entry.kind != "W") for order in orders
    ]
    owed: list[deque[ScheduledPass]] = [deque() for _ in orders]
    filled: list[list[ScheduledPass]] = [[] for _ in orders]
    free_at = [0.0] * graph.num_stages
    ends: dict[tuple[int, int], float] = {}
    while any(given):
        moved = False
        for stage, passes in enumerate(given):
            while passes and (start := _start(graph, passes[0], ends)) is not None:
                entry = passes.popleft()
                while owed[stage]:
                    cost = graph.cost("W", owed[stage][0].segment)
                    if free_at[stage] + (1 - impatience) * cost > start:
                        break
                    filled[stage].append(owed[stage].popleft())
                    free_at[stage] += cost
                free_at[stage] = max(start, free_at[stage]) + graph.cost(entry.kind, entry.segment)
                ends[graph.track(entry.kind, entry.segment), entry.microbatch] = free_at[stage]
                filled[stage].append(entry)
                if entry.kind == "I":
                    owed[stage].append(graph.passes("W", entry.segment)[entry.microbatch])
                moved = True
        assert moved, "the orders of a plan never wait for each other"
    return [[*order, *rest] for order, rest in zip(filled, owed, strict=True)]


def _start(graph: StepGraph, entry: ScheduledPass, ends: dict[tuple[int, int], float]) -> float | None:
    """Time at which all inputs of a pass have arrived; ``None`` while one is not produced yet."""
    start = 0.0
    for need, delay in graph.needs[graph.track(entry.kind, entry.segment)]:
        end = ends.get((need, entry.microbatch))
        if end is None:
            return None
        start = max(start, end + delay)
    return start


# --- search ----------------------------------------------------------------------------------------------------------


# A simpler policy wins unless another is better by more than this share.
NOTICEABLE = 0.01


class SearchResult(NamedTuple):
    """A plan and the policy it belongs to."""

    policy: Policy
    plan: Plan


class Losses(NamedTuple):
    """Overheads relative to work that is never split and always takes equally long."""

    split: float = SPLIT_OVERHEAD
    """Overhead of a backward in two parts, as a share of the whole backward."""
    spread: float = 0.0
    """Standard deviation of the time of a pass, as a share of it."""


@collecting_paused()
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
    """The fastest plan that fits; a simpler one if it is at most :data:`NOTICEABLE` slower.

    Args:
        flow: Segments of one microbatch and their dependencies.
        num_microbatches: Microbatches of the step.
        policies: Allowed policies, the simpler ones first.
        link: Latency and bandwidth of messages.
        most_bytes: Most bytes of activations on each stage; empty: unlimited. If no plan fits, the one that exceeds
            the limits least is taken.
        active_microbatches: Most microbatches in flight on a stage.
        losses: Overhead of splits and variance of passes.
        horizon: Actions by which copies from host memory come ahead of their use.

    Returns:
        The plan with its policy, and with simulated times without late messages.
    """
    limits = Limits(tuple(most_bytes) or (None,) * flow.num_stages, active_microbatches, horizon)
    # The search sees late messages (`late`), the reported times at the end are without them (`link`).
    late = link._replace(latency=link.latency + _lateness(flow, num_microbatches, losses.spread))
    found = [
        SearchResult(policy, simulate(flow, num_microbatches, policy, late, split_overhead=losses.split, thorough=True))
        for policy in policies
    ]
    too_much = [excess(each.plan, flow, limits) for each in found]
    found = [each for each, much in zip(found, too_much, strict=True) if much == min(too_much)]
    best, graph = found[0], StepGraph(flow, num_microbatches, late, losses.split)
    if min(too_much) == 0:
        best = _best(graph, flow, limits, found)
    if late != link:
        graph = StepGraph(flow, num_microbatches, link, losses.split)
        best = best._replace(plan=graph.follow(graph.orders_of(best.plan)))
    return best._replace(plan=with_period(best.plan, graph))


def _lateness(flow: Flow, num_microbatches: int, spread: float) -> float:
    """Lateness of a message, in seconds: standard deviation of the summed passes of the worst stage in a step.

    Passes vary independently of each other, so their variances add up.
    """
    variances = [0.0] * flow.num_stages
    for segment, work in flow.work.items():
        variances[segment.stage] += num_microbatches * ((spread * work.forward) ** 2 + (spread * work.backward) ** 2)
    return math.sqrt(max(variances))


def _best(graph: StepGraph, flow: Flow, limits: Limits, found: Sequence[SearchResult]) -> SearchResult:
    """A plan of ``found``, or a better one by local search.

    Args:
        graph: Passes of the step.
        flow: Segment graph that ``graph`` was made from.
        limits: Memory limits of the stages.
        found: Plans of policies within the limits, the simpler ones first.
    """
    improved: dict[bool, SearchResult] = {}
    for splits in (False, True):
        # A backward can be split under any policy.
        mine = [each for each in found if splits or not each.policy.splits_backward]
        if mine:
            mine.sort(key=lambda each: each.plan.makespan)
            plans = [each.plan for each in (*improved.values(), *mine)]
            plan = _improved(graph, flow, limits, plans, splits=splits)
            if plan is not plans[0]:
                improved[splits] = SearchResult(mine[0].policy, plan)
    return _simplest(graph, found, improved)


def _improved(graph: StepGraph, flow: Flow, limits: Limits, plans: Sequence[Plan], *, splits: bool) -> Plan:
    """The best order that local search finds, for a single step and then for steps in a row.

    Args:
        graph: Passes of the step.
        flow: Segment graph that ``graph`` was made from.
        limits: Memory limits of the stages.
        plans: Known plans, the best first.
        splits: Whether backwards may be split.
    """
    scorer = partial(PlanScorer, graph, flow, limits)
    rules = _rules(graph.num_stages, active=limits.active_microbatches, splits=splits)
    listed = cache(lambda number: list_schedule(graph, rules[number]))
    numbers, beginnings = range(len(rules)), partial(_beginnings, graph, splits=splits)
    best = LocalSearch(scorer(), splits=splits).improve(plans[0], map(listed, numbers), beginnings(plans))
    in_a_row = scorer(steps=STEPS, latest=best.makespan * (1 + NOTICEABLE))
    return LocalSearch(in_a_row, splits=splits).improve(best, map(listed, numbers), beginnings([best]))


def _rules(stages: int, *, active: int | None, splits: bool) -> list[list[Rules]]:
    """Rules of list scheduling, per stage, whose orders local search starts from; the most promising ones first."""
    usual = Rules(splits=splits, most_microbatches=active)
    return [
        *([usual._replace(patience=patience)] * stages for patience in (0.0, 0.5, 1.0)),
        [usual._replace(forward_first=True)] * stages,
        [usual._replace(most_microbatches=stages - stage) for stage in range(stages)],
    ]


def _beginnings(graph: StepGraph, plans: Sequence[Plan], *, splits: bool) -> Iterator[Orders]:
    """Starting orders of local search: those of ``plans``, with all backwards split, the last half of them, and so
    on."""
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


def _simplest(graph: StepGraph, found: Sequence[SearchResult], improved: Mapping[bool, SearchResult]) -> SearchResult:
    """The simplest plan that is nearly as fast as the fastest: by a single step first, then by steps in a row.

    Args:
        graph: Passes of the step.
        found: Plans of policies, the simpler ones first.
        improved: Better orders, with and without split backwards.
    """
    most = min(each.plan.makespan for each in (*found, *improved.values())) / (1 - NOTICEABLE)
    rated = [SearchResult(each.policy, with_period(each.plan, graph)) for each in found if each.plan.makespan <= most]
    better = {
        splits: SearchResult(each.policy, with_period(each.plan, graph))
        for splits, each in improved.items()
        if each.plan.makespan <= most
    }
    every = [*rated, *better.values()]
    fastest = min(_in_a_row(each.plan) for each in every)
    best = next(each for each in every if _in_a_row(each.plan) * (1 - NOTICEABLE) <= fastest)
    # A better order is no less simple if it splits backwards only where the policy does.
    other = better.get(best.policy.splits_backward, best)
    is_worth_it = _in_a_row(other.plan) < _in_a_row(best.plan) * (1 - NEGLIGIBLE)
    return SearchResult(best.policy, other.plan) if is_worth_it else best


def _in_a_row(plan: Plan) -> float:
    """Seconds of all simulated steps in a row."""
    assert plan.period is not None
    return plan.makespan + (STEPS - 1) * plan.period
