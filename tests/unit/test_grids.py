"""The choice of cases for every day."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.grids import enough, spaced

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)


def grid(sizes):
    return [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]


def values_in(cases):
    return {item for case in cases for item in case.items()}


@given(SIZES)
def test_each_value_occurs_and_no_case_too_many(sizes):
    cases = grid(sizes)
    chosen = [cases[number] for number in enough(cases)]
    assert values_in(chosen) == values_in(cases)
    assert len(chosen) == max(sizes)


def test_a_table_by_two_sizes_is_run_once_with_either_in_turn():
    chosen = [grid([2, 10])[number] for number in enough(grid([2, 10]))]
    assert sorted(case["b"] for case in chosen) == list(range(10))
    assert [case["a"] for case in chosen].count(0) == 5


@given(st.integers(0, 200), st.integers(1, 20))
def test_spaced_cases_are_different_and_at_equal_distances(count, most):
    chosen = spaced(count, most)
    assert len(chosen) == min(count, most)
    assert len(set(chosen)) == len(chosen)
    assert all(0 <= number < count for number in chosen)
    distances = {second - first for first, second in zip(chosen, chosen[1:], strict=False)}
    assert len(distances) <= 2
    assert not distances or max(distances) - min(distances) <= 1
