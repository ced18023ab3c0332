"""Simulated schedules: known ones for chains of stages, and invariants for every program."""

import itertools
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.work import Work
from smp_strategy.pipeline.action_order import peak_microbatches
from smp_strategy.planning.schedule.check_plan import check
from smp_strategy.planning.schedule.flow import route
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.simulate import simulate
from tests.unit.planning.schedule.flows import chain, execute, flow_of, programs

caps = st.none() | st.integers(1, 5)
policies = st.builds(
    Policy, st.sampled_from(["simple", "interleaved", "1f1b", "zb-h1", "zb-h2"]), st.integers(1, 3), caps
) | st.builds(Policy, st.just("zb-v"), st.just(2), caps)


def table(plan) -> str:
    return "\n".join(" ".join(map(str, actions)) for actions in plan.stages)


@pytest.mark.parametrize(
    ("stages", "policy", "active", "expected"),
    [
        ([0], "simple", None, "F0 F1 F2 F3 B0 B1 B2 B3"),
        ([0], "interleaved", None, "F0 B0 F1 B1 F2 B2 F3 B3"),
        (
            [0, 1],
            "simple",
            None,
            """
            F0 F1 F2 F3 B0 B1 B2 B3
            F0 F1 F2 F3 B0 B1 B2 B3""",
        ),
        (
            [0, 1],
            "interleaved",
            None,
            """
            F0 F1 F2 F3 B0 B1 B2 B3
            F0 B0 F1 B1 F2 B2 F3 B3""",
        ),
        (
            [0, 1],
            "interleaved",
            1,
            """
            F0 B0 F1 B1 F2 B2 F3 B3
            F0 B0 F1 B1 F2 B2 F3 B3""",
        ),
        (
            [0, 1],
            "interleaved",
            2,
            """
            F0 F1 B0 F2 B1 F3 B2 B3
            F0 B0 F1 B1 F2 B2 F3 B3""",
        ),
        (
            [0, 1, 2, 3],
            "simple",
            None,
            """
            F0 F1 F2 F3 B0 B1 B2 B3
            F0 F1 F2 F3 B0 B1 B2 B3
            F0 F1 F2 F3 B0 B1 B2 B3
            F0 F1 F2 F3 B0 B1 B2 B3""",
        ),
        (
            [0, 1, 0, 1],
            "interleaved",
            2,
            """
            F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1 F2 F3 F2.1 F3.1 B2.1 B3.1 B2 B3
            F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1 F2 F3 F2.1 B2.1 F3.1 B3.1 B2 B3""",
        ),
    ],
)
def test_small_timetables_are_the_known_ones(stages, policy, active, expected):
    plan = simulate(flow_of(*stages), 4, Policy(policy, 1, active))
    assert table(plan) == dedent(expected).strip()


def test_one_forward_one_backward_on_four_stages():
    plan = simulate(flow_of(0, 1, 2, 3), 6, Policy("interleaved", 1, 4))
    assert table(plan).splitlines() == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 F3 B0 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 F2 F3 B0 B1 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (
            Policy("1f1b"),
            """
            F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
            F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
            F0 B0 F1 B1 F2 B2 F3 B3 F4 B4""",
        ),
        (
            Policy("zb-h1"),
            """
            F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
            F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
            F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4""",
        ),
        (
            Policy("zb-h2"),
            """
            F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
            F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
            F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4""",
        ),
        (
            Policy("1f1b", 2),
            """
            F0 F1 F2 F0.1 F1.1 F2.1 F3 F4 B0.1 F3.1 B1.1 F4.1 B2.1 B0 B1 B2 B3.1 B4.1 B3 B4
            F0 F1 F2 F0.1 F1.1 F2.1 B0.1 F3 B1.1 F4 B2.1 F3.1 B0 F4.1 B1 B2 B3.1 B4.1 B3 B4
            F0 F1 F2 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3 B0 F4 B1 F3.1 B2 F4.1 B3.1 B4.1 B3 B4""",
        ),
        (
            Policy("zb-v", 2),
            """
            F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
            F0 F1 F2 F0.1 F3 F1.1 I0.1 W0.1 F2.1 I1.1 W1.1 I0 W0 F3.1 I2.1 W2.1 I1 W1 I3.1 W3.1 I2 I3 W2 W3
            F0 F1 F2 F3 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F2.1 I2.1 W2.1 B0 F3.1 I3.1 W3.1 B1 B2 B3""",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Policy) else "",
)
def test_published_timetables_on_three_stages(policy, expected):
    stages = [policy.stage_of_chunk(chunk, 3) for chunk in range(3 * policy.num_chunks)]
    num_microbatches = 4 if policy.name == "zb-v" else 5
    assert table(simulate(flow_of(*stages), num_microbatches, policy)) == dedent(expected).strip()


@pytest.mark.parametrize("num_stages", [2, 4])
def test_with_as_many_in_flight_as_stages_memory_and_time_are_those_of_1f1b(num_stages):
    plan = simulate(flow_of(*range(num_stages)), 8, Policy("interleaved", 1, num_stages))
    assert peak_microbatches(plan.stages[0]) == num_stages
    assert peak_microbatches(plan.stages[num_stages - 1]) == 1
    # The bubble of 1F1B and GPipe: p - 1 forwards and backwards in which a stage waits.
    assert plan.makespan == pytest.approx((8 + num_stages - 1) * 3.0)


def test_costs_move_the_order_and_the_times():
    trace_flow = flow_of(0, 1)
    plan = simulate(trace_flow, 1)
    assert plan.times == (((0.0, 1.0), (4.0, 6.0)), ((1.0, 2.0), (2.0, 4.0)))
    assert plan.bubble == pytest.approx(0.5)


LAYOUTS = [Policy("1f1b", chunks) for chunks in (1, 2, 3)] + [Policy("zb-v", 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_no_small_plan_waits_for_ever_under_any_policy_on_any_layout(num_stages, layout):
    stages = [layout.stage_of_chunk(chunk, num_stages) for chunk in range(layout.num_chunks * num_stages)]
    trace, stage_of = chain(*stages)
    flow = route(trace, stage_of, num_stages, dict.fromkeys(range(len(stages)), Work(1.0, 1.0, 1.0)))
    names = [Policy("simple"), Policy("interleaved"), Policy("zb-h1"), Policy("zb-h2"), *LAYOUTS]
    for num_microbatches, name, active in itertools.product(range(1, 7), names, (None, 1, 3)):
        plan = simulate(flow, num_microbatches, name._replace(active_microbatches=active))
        check(plan, flow, num_microbatches)
        execute(plan, trace, stage_of, num_microbatches)


@given(programs(), st.integers(1, 5), policies)
def test_every_plan_runs_to_its_end_on_stages_that_block(program, num_microbatches, policy):
    trace, stage_of, num_stages = program
    flow = route(trace, stage_of, num_stages, dict.fromkeys(range(20), Work(1.0, 1.0, 1.0)))
    plan = simulate(flow, num_microbatches, policy)
    execute(plan, trace, stage_of, num_microbatches)


@given(programs(), st.integers(1, 4), policies)
def test_every_plan_does_each_pass_once_and_in_an_order_that_the_runtime_can_follow(program, num_microbatches, policy):
    trace, stage_of, num_stages = program
    flow = route(trace, stage_of, num_stages, dict.fromkeys(range(20), Work(1.0, 1.0, 1.0)))
    plan = simulate(flow, num_microbatches, policy)
    check(plan, flow, num_microbatches)
    for stage, actions in enumerate(plan.stages):
        segments = {"F": [s for s in flow.work if s.stage == stage]}
        segments["I"] = segments["W"] = [s for s in segments["F"] if s in flow.backward_needs]
        parts = [(part, a.microbatch, a.segment) for a in actions for part in ("IW" if a.kind == "B" else a.kind)]
        assert len(parts) == num_microbatches * sum(map(len, segments.values()))
        for kind in "FIW":
            for segment in segments[kind]:
                order = [mb for part, mb, number in parts if (part, number) == (kind, segment.number)]
                assert order == list(range(num_microbatches))
        for microbatch in range(num_microbatches):
            mine = [(part, number) for part, mb, number in parts if mb == microbatch]
            forward = [number for part, number in mine if part == "F"]
            assert forward == sorted(s.number for s in segments["F"])
            # The runtime runs backward from the last segment down, so a plan must not ask for another order.
            backward = [number for part, number in mine if part == "I"]
            assert backward == sorted((s.number for s in segments["I"]), reverse=True)
            assert [part for part, _ in mine[: len(forward)]] == ["F"] * len(forward)
            assert all(mine.index(("I", number)) < mine.index(("W", number)) for number in backward)


@given(programs(), st.integers(1, 6), st.integers(1, 5))
def test_no_stage_keeps_more_microbatches_than_are_active(program, num_microbatches, cap):
    trace, stage_of, num_stages = program
    plan = simulate(route(trace, stage_of, num_stages, {}), num_microbatches, Policy("interleaved", 1, cap))
    assert all(peak_microbatches(plan.stages[stage]) <= cap for stage in range(num_stages))


@given(st.integers(1, 4), st.integers(1, 6), caps)
def test_the_simple_policy_keeps_all_microbatches_whatever_the_cap(num_stages, num_microbatches, cap):
    plan = simulate(flow_of(*range(num_stages)), num_microbatches, Policy("simple", 1, cap))
    assert all(peak_microbatches(plan.stages[stage]) == num_microbatches for stage in range(num_stages))


@given(programs(), st.integers(1, 4), policies)
def test_times_of_a_stage_do_not_overlap(program, num_microbatches, policy):
    trace, stage_of, num_stages = program
    plan = simulate(
        route(trace, stage_of, num_stages, dict.fromkeys(range(20), Work(1.0, 1.0, 1.0))),
        num_microbatches,
        policy,
    )
    for spans in plan.times:
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert plan.makespan == max((spans[-1][1] for spans in plan.times if spans), default=0.0)
    assert 0.0 <= plan.bubble < 1.0


def test_a_forward_only_step_has_no_backwards():
    trace, stage_of = chain(0, 1)
    plan = simulate(route(Trace(trace.events), stage_of, 2, {}), 3)
    assert table(plan) == "F0 F1 F2\nF0 F1 F2"
