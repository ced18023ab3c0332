"""The choice of cases for a day."""

from hypothesis import given
from hypothesis import strategies as st

from tests.grids import runs_today

COUNTS, EVERY, DAYS = st.integers(1, 40), st.integers(1, 50), st.integers(700_000, 800_000)


def chosen(count, every, start):
    return [case for case in range(count) if runs_today(case, every, start)]


@given(COUNTS, DAYS)
def test_one_case_of_each_test_runs(count, day):
    assert len(chosen(count, count, day)) == 1


@given(COUNTS, EVERY, DAYS)
def test_every_case_has_run_once_after_as_many_days_as_the_mark_says(count, every, day):
    assert sorted(case for later in range(every) for case in chosen(count, every, day + later)) == list(range(count))


@given(COUNTS, DAYS)
def test_each_case_runs_today_in_one_of_as_many_tests(count, day):
    assert sorted(case for test in range(count) for case in chosen(count, count, day + test)) == list(range(count))
