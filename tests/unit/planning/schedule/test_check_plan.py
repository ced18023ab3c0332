"""Verification of plans: errors are found before execution."""

import pytest

from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.planning.schedule.check_plan import PlanError, check
from tests.unit.planning.schedule.flows import flow_of


def plan(*stages: str) -> Plan:
    actions = tuple(tuple(map(Action.parse, stage.split())) for stage in stages)
    return Plan(actions, tuple(tuple((0.0, 0.0) for _ in stage) for stage in actions))


@pytest.mark.parametrize(
    "stages",
    [
        ("F0 F1 B0 B1", "F0 B0 F1 B1"),
        ("F0 F1 I0 W0 B1", "F0 I0 F1 W0 I1 W1"),
        ("F0 F1 B0 I1 W1", "F0 F1 I0 I1 W0 W1"),
    ],
)
def test_right_plans_pass(stages):
    check(plan(*stages), flow_of(0, 1), 2)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (("F0 F1 B0", "F0 B0 F1 B1"), "stage 0 lacks: I1"),
        (("F0 F1 B0 I1", "F0 B0 F1 B1"), "stage 0 lacks: W1"),
        (("F0 F1 B0 B1", "F0 B0 F1 B1 W1"), "stage 1 does once too often: W1"),
        (("F1 F0 B0 B1", "F0 B0 F1 B1"), "stage 0 has F1 too early: it is the turn of microbatch 0"),
        (("F0 F1 B1 B0", "F0 F1 B1 B0"), "stage 0 has B1 too early: it is the turn of microbatch 0"),
        (("F0 F1 B0 B1", "B0 F0 F1 B1"), "stage 1 has B0 too early: the forward is not complete"),
        (("F0 F1 W0 I0 B1", "F0 B0 F1 B1"), "stage 0 has W0 too early: the gradients of its inputs are not known"),
        (("F0 B0 F1 B1", "F0 F1 B0 B1"), "wait for ever: stage 0 at B0, stage 1 at F1"),
    ],
)
def test_wrong_plans_are_named(stages, message):
    with pytest.raises(PlanError, match=message):
        check(plan(*stages), flow_of(0, 1), 2)


def test_segments_go_forward_from_the_first_one_up_and_backward_from_the_last_one_down():
    flow = flow_of(0, 1, 0, 1)
    check(plan("F0 F0.1 B0.1 B0", "F0 F0.1 B0.1 B0"), flow, 1)
    with pytest.raises(PlanError, match=r"stage 0 has F0.1 too early: an earlier segment is still to come"):
        check(plan("F0.1 F0 B0.1 B0", "F0 F0.1 B0.1 B0"), flow, 1)
    with pytest.raises(PlanError, match=r"stage 1 has B0.1 too early: segments go backward from the last one down"):
        check(plan("F0 F0.1 B0.1 B0", "F0 F0.1 B0 B0.1"), flow, 1)
