"""Better orders by simulated annealing, and who judges them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_strategy.model.trace.work import Link, Work
from smp_strategy.planning.schedule import annealing
from smp_strategy.planning.schedule.annealing import anneal
from smp_strategy.planning.schedule.check_plan import check
from smp_strategy.planning.schedule.flow import route
from smp_strategy.planning.schedule.peak_memory import DEFAULT_HORIZON
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.scoring import Limits, PlanScorer
from smp_strategy.planning.schedule.simulate import simulate
from smp_strategy.planning.schedule.step_graph import ScheduledPass, StepGraph
from tests.unit.planning.schedule.flows import chain_of, execute, flow_of, programs


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    monkeypatch.setattr(annealing, "MOST_PASSES", 20_000)


def judge_of(flow, num_microbatches, *, limits=(), active=None, split_overhead=0.05, **options):
    graph = StepGraph(flow, num_microbatches, Link.instant(), split_overhead)
    most_bytes = limits or (None,) * flow.num_stages
    return PlanScorer(graph, flow, Limits(most_bytes, active, DEFAULT_HORIZON), **options)


def ends(judge, *plans):
    return [judge.timed(judge.graph.orders_of(plan)).end for plan in plans]


@settings(max_examples=30)
@given(programs(), st.integers(1, 4), st.sampled_from([1.0, 2.0]), st.sampled_from([1, 3]))
def test_what_is_found_is_no_worse_and_can_be_carried_out(program, num_microbatches, crowding, steps):
    trace, stage_of, num_stages = program
    flow = route(trace, stage_of, num_stages, {position: Work(1.0, 2.0, 0.5) for position in range(20)})
    judge = judge_of(flow, num_microbatches, crowding=crowding, steps=steps)
    plan = simulate(flow, num_microbatches, Policy("1f1b"))
    found = anneal(judge, plan)
    check(found, flow, num_microbatches)
    execute(found, trace, stage_of, num_microbatches)
    before, after = ends(judge, plan, found)
    assert judge.bound(splits=True) * (1 - 1e-8) <= after <= before


def test_on_shared_cores_a_few_backwards_are_split_for_the_waits(monkeypatch):
    monkeypatch.setattr(annealing, "MOST_PASSES", 300_000)
    # Four stages of two chunks each on two cores, which have enough to do except where one step follows another.
    flow = flow_of(0, 1, 2, 3, 0, 1, 2, 3, work=Work(1.0, 1.1, 0.9))
    judge = judge_of(flow, 4, crowding=2.0, steps=3)
    plan = simulate(flow, 4, Policy("1f1b", 2), split_overhead=0.05)
    found = anneal(judge, plan)
    before, after = ends(judge, plan, found)
    assert after < 0.98 * before
    num_split = sum(action.kind == "W" for stage in found.stages for action in stage)
    assert 0 < num_split < 28 / 2


def test_where_all_share_one_core_nothing_is_split(monkeypatch):
    monkeypatch.setattr(annealing, "MOST_PASSES", 200_000)
    flow = flow_of(0, 1, 2, work=Work(1.0, 1.0, 1.0))
    judge = judge_of(flow, 4, crowding=3.0, steps=3)
    found = anneal(judge, simulate(flow, 4, Policy("zb-h1"), split_overhead=0.05))
    assert {action.kind for stage in found.stages for action in stage} == {"F", "B"}
    assert ends(judge, found) == [pytest.approx(judge.bound(splits=True))]


def test_all_ranks_find_the_same():
    flow = flow_of(0, 1, 2, 3, work=Work(1.0, 1.3, 0.7))
    judge = judge_of(flow, 6, crowding=2.0, steps=3)
    plan = simulate(flow, 6, Policy("1f1b"))
    assert anneal(judge, plan) == anneal(judge, plan)


def test_limits_are_kept():
    flow = chain_of([Work(1.0, 1.0, 1.0)] * 3, saved_bytes=10)
    plan = simulate(flow, 6, Policy("1f1b"))
    free, bound = judge_of(flow, 6, steps=3), judge_of(flow, 6, limits=(30, 20, 10), active=3, steps=3)
    assert free.allows(anneal(free, plan))
    assert not bound.allows(anneal(free, plan))
    assert bound.allows(anneal(bound, plan))


def test_a_step_that_is_alone_ends_in_time():
    flow = flow_of(0, 1, 2, 3, work=Work(1.0, 1.0, 1.0))
    alone = judge_of(flow, 6)
    plan = simulate(flow, 6, Policy("zb-h1"), split_overhead=0.05)
    (latest,) = ends(alone, plan)
    found = anneal(judge_of(flow, 6, steps=3, latest=latest), plan)
    assert ends(alone, found)[0] <= latest * (1 + 1e-8)


def test_gradients_of_a_weight_are_added_in_the_order_of_the_microbatches():
    flow = flow_of(0, 1, 2, 3, 0, 1, 2, 3, work=Work(1.0, 1.1, 0.9))
    judge = judge_of(flow, 4, crowding=2.0, steps=3)
    found = anneal(judge, simulate(flow, 4, Policy("1f1b", 2), split_overhead=0.05))
    for order in judge.graph.orders_of(found):
        sums = [(entry.segment, entry.microbatch) for entry in order if entry.kind in "BW"]
        for segment in {segment for segment, _ in sums}:
            assert [microbatch for other, microbatch in sums if other == segment] == [0, 1, 2, 3]


def test_backwards_of_one_segment_are_split():
    graph = StepGraph(flow_of(0, 1, 0, 1), 2, Link.instant(), 0.0)
    order = [ScheduledPass("B", segment, microbatch) for microbatch, segment in itertools.product((0, 1), (3, 1))]
    parted = graph.parted(order, num_whole=1, segment=1)
    assert parted == [*order[:3], ScheduledPass("I", 1, 1), ScheduledPass("W", 1, 1)]
    assert graph.whole(parted, 1, 2) == order


def test_a_pass_overtakes_nothing_that_it_needs():
    graph = StepGraph(flow_of(0, 1), 2, Link.instant(), 0.0)
    order = [
        ScheduledPass("F", 1, 0),
        ScheduledPass("F", 1, 1),
        ScheduledPass("I", 1, 0),
        ScheduledPass("W", 1, 0),
        ScheduledPass("I", 1, 1),
    ]
    assert graph.reachable(order, 1, 4) == 3
    assert graph.reachable(order, 3, 0) == 3
    assert graph.reachable(order, 4, 0) == 3
