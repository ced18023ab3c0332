"""Steps in a row: their times, and the best orders for them."""

import math
import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.model.trace.work import Link, Work
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.schedule.flow import route
from smp_strategy.planning.schedule.peak_memory import peak_saved_bytes
from smp_strategy.planning.schedule.policies import Policy, candidates
from smp_strategy.planning.schedule.search import NOTICEABLE, Losses, search
from smp_strategy.planning.schedule.simulate import simulate
from smp_strategy.planning.schedule.step_graph import StepGraph
from smp_strategy.planning.schedule.steps_in_a_row import STEPS, with_period
from tests.unit.planning.schedule.flows import chain, chain_of, flow_of, programs


@given(programs(), st.integers(1, 4), st.integers(1, 4), st.sampled_from(candidates(4, 8, num_units=99)))
def test_steps_in_a_row_are_one_long_step_in_that_order(program, num_microbatches, steps, policy):
    trace, stage_of, num_stages = program
    flow = route(trace, stage_of, num_stages, {position: Work(1.0, 2.0, 0.5) for position in range(20)})
    link = Link(0.1, 100.0)
    graph = StepGraph(flow, num_microbatches, link, 0.0)
    orders = graph.orders_of(simulate(flow, num_microbatches, policy, link, split_overhead=0.0))
    row = graph.follow_in_a_row(orders, steps)
    plan = graph.plan_of(row)
    assert plan == graph.follow(orders)
    long = StepGraph(flow, steps * num_microbatches, link, 0.0)
    one_after_the_other = [
        [
            entry._replace(microbatch=entry.microbatch + step * num_microbatches)
            for step, entry in product(range(steps), order)
        ]
        for order in orders
    ]
    assert long.follow(one_after_the_other).times == tuple(map(tuple, row.times))


@given(programs(), st.integers(1, 4), st.booleans())
def test_no_row_is_shorter_than_its_bound(program, num_microbatches, splits):
    trace, stage_of, num_stages = program
    flow = route(trace, stage_of, num_stages, {position: Work(1.0, 2.0, 0.5) for position in range(20)})
    graph = StepGraph(flow, num_microbatches, Link.instant(), 0.0)
    for policy in candidates(num_stages, num_microbatches, num_units=99):
        if splits or not policy.splits_backward:
            plan = simulate(flow, num_microbatches, policy, split_overhead=0.0)
            assert graph.follow_in_a_row(graph.orders_of(plan), STEPS).end >= graph.least_makespan(
                splits=splits, steps=STEPS
            ) * (1 - 1e-9)


def chains() -> list[list[Work]]:
    """The stages of fifteen chains."""
    rng = random.Random(3)
    return [[Work(*(rng.uniform(0.9, 1.1) for _ in range(3))) for _ in range(rng.choice([2, 3, 4]))] for _ in range(15)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", range(3))
def test_what_is_found_is_good_alone_and_better_in_a_row_than_the_published_orders(part):
    every = chains()
    # For the fourth one no published order would do, so it is among them each day.
    for works in [every[number] for number in sorted({3, *range(part, 15, 3)})]:
        stages, count = len(works), 2 * len(works)
        flow = chain_of(works)
        graph = StepGraph(flow, count, Link.instant(), 0.0)
        policies = candidates(stages, count, num_units=stages)
        published = [with_period(simulate(flow, count, policy, split_overhead=0.0), graph) for policy in policies]
        found = search(flow, count, policies, losses=Losses(split=0.0)).plan
        fastest = min(plan.makespan for plan in published)
        assert found.makespan <= fastest * (1 + NOTICEABLE) + 1e-9
        as_fast = [plan.period for plan in published if plan.makespan <= found.makespan * (1 + 1e-9)]
        assert found.period <= min(as_fast) * (1 + NOTICEABLE)
        # The busiest stage waits for next to nothing.
        busiest = max(sum(end - start for start, end in times) for times in found.times)
        assert found.period <= 1.02 * busiest


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placement", [Policy("zb-v", 2), Policy("1f1b", 2)], ids=["v", "loop"])
def test_with_two_chunks_the_busiest_stage_waits_for_next_to_nothing(placement):
    # As the passes of a transformer's block (arXiv:2401.10241, table 1).
    flow = flow_of(*(placement.stage_of_chunk(chunk, 4) for chunk in range(8)), work=Work(7.0, 8.0, 6.0))
    policies = [policy for policy in candidates(4, 8, num_units=8) if policy.num_chunks == 2]
    found = search(flow, 8, policies, losses=Losses(split=0.0)).plan
    busiest = max(sum(end - start for start, end in times) for times in found.times)
    assert found.period <= 1.02 * busiest
    published = simulate(flow, 8, Policy("zb-v", 2), split_overhead=0.0)
    assert found.makespan <= published.makespan * (1 + NOTICEABLE)


def test_orders_that_take_more_memory_are_not_taken_where_there_is_none():
    flow = chain_of([Work(1.0, 1.0, 1.0)] * 4, saved_bytes=10)
    policies = candidates(4, 8, num_units=4)
    free, tight = (search(flow, 8, policies, most_bytes=[limit] * 4, losses=Losses(split=0.0)) for limit in (None, 40))
    assert free.policy == Policy("zb-h2")
    assert free.plan.period == pytest.approx(24.0)
    assert max(peak_saved_bytes(free.plan, flow)) > 40
    assert max(peak_saved_bytes(tight.plan, flow)) <= 40
    assert 24.0 < tight.plan.period <= tight.plan.makespan


def test_backwards_are_whole_where_their_parts_would_only_cost():
    flow = chain_of([Work(1.0, 1.0, 1.0)] * 4)
    found = search(flow, 8, candidates(4, 8, num_units=4), losses=Losses(split=0.05)).plan
    split = {action for actions in found.stages for action in actions if action.kind == "I"}
    # All but those of the first stage, of whose backward nobody waits for a part, would be 24.
    assert 0 < len(split) < 24
    everything = simulate(flow, 8, Policy("zb-h2"), split_overhead=0.05)
    assert found.makespan <= everything.makespan


def test_where_passes_vary_an_order_is_found_that_does_not_wait_for_late_messages():
    # A V. Stage 0 has less to do (24 a microbatch) than stage 1 (26), which need never wait for it.
    trace, stage_of = chain(1, 0, 1)
    flow = route(trace, stage_of, 2, dict(enumerate([Work(4, 2, 6), Work(8, 9, 7), Work(5, 5, 4)])))
    losses = Losses(split=0.03)
    steady, varying = (
        search(flow, 4, [Policy("zb-v", 2)], losses=losses._replace(spread=spread)).plan for spread in (0.0, 0.02)
    )
    usual, late = (StepGraph(flow, 4, Link(latency, math.inf), losses.split) for latency in (0.0, 2.0))

    def in_a_row(graph: StepGraph, plan: Plan) -> float:
        return graph.follow_in_a_row(graph.orders_of(plan), STEPS).end / STEPS

    assert in_a_row(usual, varying) <= in_a_row(usual, steady) * 1.005
    assert in_a_row(late, varying) <= in_a_row(late, steady) * 0.97
    # What is predicted is what happens if nothing is late.
    assert varying.times == usual.follow(usual.orders_of(varying)).times
