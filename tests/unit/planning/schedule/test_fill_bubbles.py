"""Weight gradients in the bubbles of a schedule."""

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.model.trace.work import Link, Work
from smp_strategy.planning.schedule.check_plan import check
from smp_strategy.planning.schedule.flow import route
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.search import Losses, fill_waits, search
from smp_strategy.planning.schedule.simulate import simulate
from smp_strategy.planning.schedule.step_graph import StepGraph
from tests.unit.planning.schedule.flows import flow_of, programs


def filled(flow, num_microbatches, policy, impatience=0.0):
    graph = StepGraph(flow, num_microbatches, Link.instant(), 0.0)
    orders = graph.orders_of(simulate(flow, num_microbatches, policy))
    return graph.follow(fill_waits(graph, orders, impatience=impatience))


def test_one_forward_one_backward_with_filled_waits_is_as_fast_as_zero_bubble():
    plan = filled(flow_of(0, 1, 2), 4, Policy("1f1b"))
    assert "\n".join(" ".join(map(str, actions)) for actions in plan.stages) == (
        dedent(
            """
            F0 F1 F2 B0 F3 B1 B2 B3
            F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
            F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"""
        ).strip()
    )
    assert plan.makespan == simulate(flow_of(0, 1, 2), 4, Policy("zb-h1"), split_overhead=0.0).makespan


@given(programs(), st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]))
def test_filled_plans_are_complete_and_run_to_their_end(program, num_microbatches, impatience):
    trace, stage_of, num_stages = program
    flow = route(trace, stage_of, num_stages, dict.fromkeys(range(20), Work(1.0, 1.0, 1.0)))
    check(filled(flow, num_microbatches, Policy("interleaved"), impatience), flow, num_microbatches)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (4, 8)])
def test_chunks_that_are_dealt_out_in_turn_get_a_timetable_that_nothing_beats(num_stages, num_microbatches):
    flow = flow_of(*[*range(num_stages)] * 2)
    found = search(flow, num_microbatches, [Policy("1f1b", 2)], losses=Losses(split=0.0))
    graph = StepGraph(flow, num_microbatches, Link.instant(), 0.0)
    assert found.plan.makespan == pytest.approx(graph.least_makespan(splits=True))
