"""The choice of cases for every day."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.grids import enough

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)


def grid(sizes):
    return [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]


def occurring(cases, strength):
    return {each for case in cases for each in combinations(sorted(case.items()), strength)}


@given(SIZES)
def test_each_value_occurs_and_with_three_parameters_each_pair(sizes):
    cases = grid(sizes)
    chosen = [cases[number] for number in enough(cases)]
    for strength in range(1, 2 if len(sizes) == 2 else 3):
        assert occurring(chosen, strength) == occurring(cases, strength)


def test_a_table_by_two_sizes_is_run_once_with_either_in_turn():
    chosen = [grid([2, 10])[number] for number in enough(grid([2, 10]))]
    assert sorted(case["b"] for case in chosen) == list(range(10))
    assert [case["a"] for case in chosen].count(0) == 5
