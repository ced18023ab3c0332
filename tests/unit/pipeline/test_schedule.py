"""Actions and plans as data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.pipeline.schedule import Action, Plan

actions = st.builds(Action, st.sampled_from("FBIW"), st.integers(0, 10**6), st.integers(0, 100))


@given(actions)
def test_an_action_is_read_back_from_its_text(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("action", "text"), [(Action("F", 3), "F3"), (Action("B", 0, 1), "B0.1"), (Action("F", 12, 0), "F12")]
)
def test_an_action_has_a_short_text(action, text):
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F", "X1", "F1.", "F-1", "F1.1.1", " F1", "f1"])
def test_other_texts_are_no_actions(text):
    with pytest.raises(ValueError, match=r"An action looks like `F3` or `B0.1`"):
        Action.parse(text)


def plan(text: str) -> Plan:
    acts = tuple(map(Action.parse, text.split()))
    return Plan((acts,), (tuple((float(i), i + 1.0) for i in range(len(acts))),))


def test_an_empty_plan_takes_no_time():
    assert plan("").makespan == 0.0
    assert plan("").bubble == 0.0
