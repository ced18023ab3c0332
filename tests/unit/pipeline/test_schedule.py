"""Actions and plans as data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.pipeline.action_order import begun_early
from smp_strategy.pipeline.schedule import Action, Plan, crowded, end_of

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


SPANS = st.lists(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=5), min_size=1, max_size=4)


def timed(spans: list[list[tuple[int, int]]]) -> Plan:
    """A plan of which each stage waits and works in turn, for these seconds."""
    times = []
    for stage in spans:
        ends, now = [], 0.0
        for wait, work in stage:
            ends.append((now + wait, now + wait + work))
            now = ends[-1][1]
        times.append(tuple(ends))
    acts = tuple(tuple(Action("F", number) for number in range(len(stage))) for stage in spans)
    return Plan(acts, tuple(times))


def test_stages_that_share_cores_slow_each_other_down():
    both = Plan(((Action("F", 0),), (Action("F", 0),)), (((0.0, 1.0),), ((0.5, 2.0),)))
    assert crowded(both.times, 2.0) == (((0.0, 1.5),), ((0.5, 2.5),))
    assert crowded(both.times, 1.0) == both.times


@given(SPANS)
def test_one_core_for_all_does_the_work_of_all_and_waits_where_all_wait(spans):
    plan = timed(spans)
    slower = crowded(plan.times, float(len(spans)))
    busy = sum(end - start for stage in plan.times for start, end in stage)
    moments = range(round(plan.makespan))
    idle = sum(not any(start <= t < end for stage in plan.times for start, end in stage) for t in moments)
    assert end_of(slower) == pytest.approx(busy + idle)


@given(SPANS, st.floats(1.0, 4.0))
def test_with_shared_cores_all_happens_in_the_same_order_and_later(spans, crowding):
    plan = timed(spans)
    before = [moment for stage in plan.times for span in stage for moment in span]
    after = [moment for stage in crowded(plan.times, crowding) for span in stage for moment in span]
    assert all(new >= old for old, new in zip(before, after, strict=True))
    order = sorted(range(len(before)), key=before.__getitem__)
    assert [after[index] for index in order] == sorted(after)


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
