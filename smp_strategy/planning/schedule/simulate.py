"""Simulation of a pipeline schedule: computes the order of actions and their times for a policy and a segment graph.

A policy (:mod:`smp_strategy.planning.schedule.policies`) proposes orders: the published schedule if the flow is the
chain of chunks that it was made for, and list scheduling under the policy's rules for any flow. If a policy has
several proposals (Zero Bubble: the best one depends on the costs of passes), the fastest one is taken. The same
simulation times all of them, messages included.

The forwards of a segment run in the order of the microbatches, and so do its backwards: gradients are added up in
the order of a single process that accumulates over the same microbatches, which makes the sums bit-identical.

The simulated order is a topological order of the dependency graph, so stages that follow it cannot deadlock.
"""

from collections.abc import Iterator

from smp_strategy.model.trace.work import Link
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.schedule.flow import Flow
from smp_strategy.planning.schedule.list_scheduling import Rules, list_schedule
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.published import one_forward_one_backward, zero_bubble, zero_bubble_v
from smp_strategy.planning.schedule.step_graph import Orders, SimulatedRow, StepGraph
from smp_strategy.planning.schedule.steps_in_a_row import STEPS

__all__ = ["NEGLIGIBLE", "SPLIT_OVERHEAD", "simulate"]

# Overhead of a split backward, as a share of the whole one: 0.05 to 0.08 for blocks of GPT-2 on a CPU
# (`benchmarks/split_backward.py`).
SPLIT_OVERHEAD = 0.07
# A plan within this share of the lower bound ends the search among proposals.
GOOD_ENOUGH = 0.015
# Schedules within this share of the fastest one are equally good, and the simpler one is taken.
NEGLIGIBLE = 1e-3


def simulate(
    flow: Flow,
    num_microbatches: int,
    policy: Policy = Policy(),  # noqa: B008  (a named tuple cannot change)
    link: Link = Link.instant(),  # noqa: B008
    *,
    split_overhead: float = SPLIT_OVERHEAD,
    thorough: bool = False,
) -> Plan:
    """Schedule a step under a policy.

    Args:
        flow: Segments of one microbatch and their dependencies.
        num_microbatches: Microbatches of the step.
        policy: Schedule by name.
        link: Latency and bandwidth of messages.
        split_overhead: Overhead of a split backward, as a share of the whole one.
        thorough: Whether to decide stage by stage if backwards are split, which is slower than for all at once.

    Returns:
        Plan of every stage. Two stages, four microbatches, ``1f1b``::

            stage 0   F0 F1 B0 F2 B1 F3 B2 B3
            stage 1   F0 B0 F1 B1 F2 B2 F3 B3
    """
    graph = StepGraph(flow, num_microbatches, link, split_overhead)
    enough = (1 + GOOD_ENOUGH) * graph.least_makespan(splits=policy.splits_backward, at_once=False)
    best: SimulatedRow | None = None
    for orders in _proposals(graph, policy):
        row = graph.follow_in_a_row(graph.merged(orders, everywhere=False) if policy.splits_backward else orders, 1)
        if best is None or row.makespan < best.makespan * (1 - NEGLIGIBLE):
            best = row
        if best.makespan <= enough:
            break
    assert best is not None
    return graph.plan_of(_with_whole_backwards(graph, best, thorough=thorough) if policy.splits_backward else best)


def _with_whole_backwards(graph: StepGraph, best: SimulatedRow, *, thorough: bool) -> SimulatedRow:
    """``best`` with whole backwards on all stages, and then stage by stage, where that makes neither a single step nor
    steps in a row longer."""
    merged = graph.merged(best.orders, everywhere=True)
    stages = range(graph.num_stages)
    in_a_row: SimulatedRow | None = None
    for group in [stages, *([stage] for stage in stages if thorough)]:
        if all(len(merged[stage]) == len(best.orders[stage]) for stage in group):
            continue
        in_a_row = in_a_row or graph.follow_in_a_row(best.orders, STEPS)
        whole = graph.follow_in_a_row(
            [merged[stage] if stage in group else order for stage, order in enumerate(best.orders)], STEPS
        )
        if whole.makespan <= best.makespan and whole.end <= in_a_row.end:
            best = in_a_row = whole
            merged = graph.merged(best.orders, everywhere=True)
    return best


def _proposals(graph: StepGraph, policy: Policy) -> Iterator[Orders]:
    """Candidate orders under ``policy``, the published ones first."""
    match policy.name:
        case "simple":
            yield list_schedule(graph, [Rules(forward_first=True)] * graph.num_stages)
        case "interleaved":
            active = policy.most_active(graph.num_stages)
            yield list_schedule(graph, [Rules(most_microbatches=active)] * graph.num_stages)
        case "1f1b":
            yield from _one_forward_one_backward(graph, policy)
        case "zb-h1" | "zb-h2":
            yield from _zero_bubble(graph, policy)
        case "zb-v":
            yield from _zero_bubble_v(graph, policy)


def _one_forward_one_backward(graph: StepGraph, policy: Policy) -> Iterator[Orders]:
    stages, chunks, active = graph.num_stages, policy.num_chunks, policy.active_microbatches
    tables = [
        one_forward_one_backward(
            stage, stages, graph.num_microbatches, chunks, most_live=active if chunks == 1 else None
        )
        for stage in range(stages)
    ]
    orders = graph.expand(tables)
    if orders is not None and (chunks == 1 or active is None):
        yield orders
        return
    if chunks == 1:
        live = [stages - stage for stage in range(stages)]
    else:
        live = [2 * (stages - stage - 1) + (chunks - 1) * stages + 1 for stage in range(stages)]
    yield list_schedule(graph, [Rules(most_live=most, most_microbatches=active, group=stages) for most in live])


def _zero_bubble(graph: StepGraph, policy: Policy) -> Iterator[Orders]:
    """Zero Bubble with one chunk per stage: at most p (ZB-H1) or 2p - 1 (ZB-H2) microbatches in flight."""
    stages = graph.num_stages
    most = stages if policy.name == "zb-h1" else 2 * stages - 1
    most = min(most, policy.active_microbatches or most)
    # With many microbatches the bubbles of 1F1B cost less than splits.
    yield from _one_forward_one_backward(graph, Policy("1f1b", 1, most))
    for slope in dict.fromkeys((1 if policy.name == "zb-h1" else 2, 1)):
        warm_ups = [min(slope * (stages - stage - 1), most - 1) for stage in range(stages)]
        delays = [min(slope * stage, most - 1 - warm_up) for stage, warm_up in enumerate(warm_ups)]
        tables = [
            zero_bubble(warm_up, delay, graph.num_microbatches) for warm_up, delay in zip(warm_ups, delays, strict=True)
        ]
        if (orders := graph.expand(tables)) is not None:
            yield orders
    yield from _greedy(graph, Rules(splits=True, most_microbatches=most))


def _zero_bubble_v(graph: StepGraph, policy: Policy) -> Iterator[Orders]:
    stages = graph.num_stages
    tables = [zero_bubble_v(stages - 1 - stage, stages, graph.num_microbatches) for stage in range(stages)]
    orders = graph.expand(tables, turns=True)
    if orders is not None and policy.active_microbatches is None:
        yield orders
    # No patience: a stage with two chunks has another pass to run most of the time.
    live = [stages * min(2, len(visits)) for visits in graph.visits]
    active = policy.active_microbatches
    yield list_schedule(graph, [Rules(splits=True, most_live=most, most_microbatches=active) for most in live])


def _greedy(graph: StepGraph, rules: Rules) -> Iterator[Orders]:
    for patience in (0.0, 0.5):
        yield list_schedule(graph, [rules._replace(patience=patience)] * graph.num_stages)
