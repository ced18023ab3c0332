"""Actions and plans as data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.pipeline.action_order import begun_early
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


@pytest.mark.parametrize(
    ("text", "peak"),
    [("", 0), ("F0 B0 F1 B1", 1), ("F0 F1 B0 B1", 2), ("F0 F1 F0.1 B0.1 B0 F2 B1", 2), ("F0 F1 F2", 1)],
)
def test_a_microbatch_is_kept_from_its_first_action_to_its_last(text, peak):
    assert plan(text).peak_microbatches(0) == peak


def test_an_empty_plan_takes_no_time():
    assert plan("").makespan == 0.0
    assert plan("").bubble == 0.0


@pytest.mark.parametrize(
    ("text", "early"),
    [
        ("", []),
        ("F0 F1 F2 B0 B1 B2", [(), (), (), (), (), ()]),
        ("F0 F1 B0 F2 B1 B2", [(), (2,), (), (), (), ()]),
        ("F0 B0 F1 B1 F2 B2", [(1,), (), (2,), (), (), ()]),
        ("F0 I0 W0 F1", [(1,), (1,), (), ()]),
        ("F0 F1 F2 F0.1 F1.1 F2.1 B0.1", [(1, 2), (2, 0), (), (), (), (), ()]),
        ("F0 F1 F0.1 B0.1 F1.1", [(1, 0), (), (1,), (), ()]),
    ],
)
def test_the_next_microbatch_begins_early_where_none_ends_meanwhile(text, early):
    assert begun_early(plan(text).stages[0]) == early
