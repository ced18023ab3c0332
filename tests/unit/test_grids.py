"""The choice of cases for a day."""

import os
import subprocess
from datetime import date

from hypothesis import given
from hypothesis import strategies as st

from tests.grids import day_of_commit, runs_today

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


def test_the_day_is_that_of_the_last_commit(tmp_path):
    dated = os.environ | {"GIT_COMMITTER_DATE": "2024-02-29T23:30:00+0100", "GIT_AUTHOR_DATE": "2020-01-01T00:00:00"}
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, env=dated, check=True)
    assert day_of_commit(tmp_path) == date(2024, 2, 29).toordinal()


def test_without_a_repository_the_day_is_that_of_today(tmp_path):
    before = date.today().toordinal()
    assert before <= day_of_commit(tmp_path) <= date.today().toordinal()
