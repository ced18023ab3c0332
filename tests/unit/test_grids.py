"""The choice of cases for a day."""

from hypothesis import given
from hypothesis import strategies as st

from tests.grids import of_today

COUNTS, MOST, DAYS = st.integers(1, 40), st.integers(1, 5), st.integers(700_000, 800_000)


@given(COUNTS, MOST, DAYS)
def test_cases_of_a_day_are_different_and_no_more_than_wanted(count, most, day):
    chosen = of_today(count, most, day)
    assert len(chosen) == len(set(chosen)) == min(count, most)
    assert all(0 <= number < count for number in chosen)


@given(COUNTS, MOST, DAYS)
def test_every_case_of_a_test_has_run_after_as_many_days_as_there_are_cases(count, most, day):
    chosen = {number for later in range(count) for number in of_today(count, most, day + later)}
    assert chosen == set(range(count))


@given(COUNTS, MOST, DAYS)
def test_every_case_runs_each_day_in_some_of_as_many_tests(count, most, day):
    chosen = {number for test in range(count) for number in of_today(count, most, day + test)}
    assert chosen == set(range(count))
