"""Peak activation memory of stages, and its moments."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.model.trace.work import Work
from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.planning.schedule.flow import Flow, KeptBytes, route
from smp_strategy.planning.schedule.peak_memory import Peak, moments, peak_saved_bytes, peaks, used_bytes
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.simulate import simulate
from tests.unit.planning.schedule.flows import flow_of, programs

POLICIES = ["simple", "interleaved", "1f1b", "zb-h1", "zb-h2"]


def with_kept(flow: Flow, *calls: tuple[int, int, int]) -> Flow:
    """``flow``, each segment of which makes these calls."""
    return replace(flow, kept={segment: [KeptBytes("u", *call) for call in calls] for segment in flow.work})


def plan_of(*texts: str) -> Plan:
    stages = tuple(tuple(Action.parse(action) for action in text.split()) for text in texts)
    return Plan(stages, tuple(tuple((0.0, 0.0) for _ in actions) for actions in stages))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Flow, Plan]:
    trace, stage_of, num_stages = draw(programs())
    flow = route(trace, stage_of, num_stages, dict.fromkeys(range(len(trace.events)), Work(1.0, 1.0, 1.0)))
    sizes = st.integers(0, 20)
    kept = {
        segment: [KeptBytes(call.name, draw(sizes), draw(sizes), draw(sizes)) for call in calls]
        for segment, calls in flow.kept.items()
    }
    flow = replace(flow, kept=kept)
    return flow, simulate(flow, draw(st.integers(1, 5)), Policy(draw(st.sampled_from(POLICIES))))


def replayed(plan: Plan, flow: Flow, horizon: int, gradients: dict[str, int] | None = None) -> list[int]:
    """The peaks, by following each call of each action."""
    sizes, peaks = gradients or {}, []
    for stage, actions in enumerate(plan.stages):
        backward = {(a.segment, a.microbatch): p for p, a in enumerate(actions) if a.kind in "BI"}
        there: set[tuple[int, int]] = set()
        missing = {call.name for segment, calls in flow.kept.items() if segment.stage == stage for call in calls}
        peak = 0

        def lacking(names: set[str]) -> int:
            return sum(sizes.get(name, 0) for name in names)

        for position, action in enumerate(actions):
            place = (action.segment, action.microbatch)
            if place not in backward:
                continue
            calls = flow.kept[SegmentId(stage, action.segment)]

            def resting(places: set[tuple[int, int]], reach: int) -> int:
                total = 0
                for segment, microbatch in places:
                    mine = flow.kept[SegmentId(stage, segment)]  # noqa: B023
                    total += sum(call.saved for call in mine)
                    if backward[segment, microbatch] <= reach:  # noqa: B023
                        total += sum(call.offloaded for call in mine)
                return total

            alone = flow.num_stages == 1
            if action.kind in "FB":
                others = resting(there - {place}, position - 1 if alone else position + horizon)
                peak = max(peak, others - lacking(missing))
                stays = not alone and backward[place] <= position + horizon
                width = 0 if stays else horizon + 1 if action.kind == "B" else 3
                for number, call in enumerate(calls):
                    there_now = calls if stays else calls[max(0, number + 1 - width) : number + 1]
                    used = sum(each.saved for each in calls[: number + 1]) + sum(each.offloaded for each in there_now)
                    # Backward has computed the gradients of the later calls.
                    later = {each.name for each in calls} - {each.name for each in calls[: number + 1]}
                    absent = missing - later if action.kind == "B" else missing
                    peak = max(peak, others + used + (call.again if action.kind == "B" else 0) - lacking(absent))
            else:
                again = max((call.again for call in calls), default=0) if action.kind == "I" else 0
                around = resting(there, position if alone else position + horizon)
                peak = max(peak, around + again - lacking(missing))
            if action.kind == "F":
                there.add(place)
            elif action.kind in "BW":
                there.discard(place)
                missing -= {call.name for call in calls}
        peaks.append(peak)
    return peaks


@given(steps(), st.integers(1, 6))
def test_the_moments_that_count_are_the_fullest_of_all(step, horizon):
    flow, plan = step
    peaks = [max((used_bytes(moment, flow) for moment in mine), default=0) for mine in moments(plan, flow, horizon)]
    assert peaks == replayed(plan, flow, horizon)
    assert list(peak_saved_bytes(plan, flow, horizon)) == peaks


@given(steps())
def test_where_nothing_is_computed_again_the_short_way_finds_the_same(step):
    flow, plan = step
    kept = {segment: [call._replace(again=0, offloaded=0) for call in calls] for segment, calls in flow.kept.items()}
    flow = replace(flow, kept=kept)
    assert list(peak_saved_bytes(plan, flow)) == replayed(plan, flow, 4)


@given(steps(), st.integers(1, 6), st.booleans(), st.data())
def test_gradients_that_do_not_exist_yet_leave_room_at_every_moment(step, horizon, is_plain, data):
    flow, plan = step
    if is_plain:
        kept = {
            segment: [call._replace(again=0, offloaded=0) for call in calls] for segment, calls in flow.kept.items()
        }
        flow = replace(flow, kept=kept)
    names = {call.name for calls in flow.kept.values() for call in calls}
    gradients = {name: data.draw(st.integers(0, 50)) for name in sorted(names)}
    found = peaks(plan, flow, horizon, gradients)
    assert [peak.total for peak in found] == replayed(plan, flow, horizon, gradients)


def test_what_is_computed_again_is_there_once_and_beside_what_comes_before():
    flow = with_kept(flow_of(0, 1), (1, 10, 0), (1, 20, 0), (1, 10, 0))
    plan = plan_of("F0 F1 B0 B1", "F0 B0 F1 B1")
    # Two calls are kept when the second one comes back; on the first stage three of the other microbatch, too.
    assert peak_saved_bytes(plan, flow) == (2 + 20 + 3, 2 + 20)


def test_where_weight_gradients_are_left_for_later_what_is_kept_waits_and_what_is_computed_again_does_not():
    flow = with_kept(flow_of(0, 1), (1, 10, 0), (1, 20, 0))
    plan = plan_of("F0 F1 I0 I1 W0 W1", "F0 B0 F1 B1")
    assert peak_saved_bytes(plan, flow)[0] == 2 * 2 + 20


@pytest.mark.parametrize(("horizon", "expected"), [(1, 200), (2, 300), (9, 400)])
def test_what_is_in_host_memory_is_back_within_the_horizon(horizon, expected):
    flow = with_kept(flow_of(0, 1), (0, 0, 100))
    plan = plan_of("F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")
    assert peak_saved_bytes(plan, flow, horizon)[0] == expected


def test_gradients_take_memory_from_the_first_backward_of_their_segment_on():
    flow = flow_of(0, 1, 0, 1)
    names = {SegmentId(0, 0): "a", SegmentId(1, 0): "b", SegmentId(0, 1): "c", SegmentId(1, 1): "d"}
    flow = replace(flow, kept={each: [KeptBytes(names[each], 10 * (each.number + 1))] for each in flow.work})
    plan = plan_of("F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1")
    # The first stage is fullest before its first backward; the second one when it has the gradients of `d`.
    assert peaks(plan, flow, gradients={"a": 5, "b": 3, "c": 7, "d": 50}) == (Peak(60, 0, 12), Peak(40, 0, 3))
    # Or at the end, when all gradients are there and no activations are.
    assert peaks(plan, flow, gradients={"a": 500, "b": 500, "c": 0, "d": 0})[0] == Peak(10)


def test_a_single_stage_counts_calls():
    flow = with_kept(flow_of(0), *[(0, 0, 100)] * 12)
    assert peak_saved_bytes(plan_of("F0 B0"), flow, 4) == (500,)


def test_working_memory_is_that_of_the_call_that_runs():
    flow = flow_of(0)
    (segment,) = flow.work
    calls = [KeptBytes("a", 10, working=50), KeptBytes("b", 30, working=5)]
    # With the second microbatch in flight: its first call, whose backward comes last, or its last one.
    assert peaks(plan_of("F0 F1 B1 B0"), replace(flow, kept={segment: calls})) == (Peak(40 + 10, 50),)
    assert peaks(plan_of("F0 F1 B1 B0"), replace(flow, kept={segment: calls[::-1]})) == (Peak(40 + 40, 50),)
