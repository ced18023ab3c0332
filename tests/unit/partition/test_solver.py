"""The solver against brute force."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.errors import ConfigError
from smp_strategy.partition.problem import Problem, UnitCost
from smp_strategy.partition.solver import TOLERANCE, solve


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to 10 units whose parameters are partly shared, on up to 4 stages."""
    num_units = draw(st.integers(1, 10))
    num_stages = draw(st.integers(1, min(4, num_units)))
    sizes = draw(st.lists(st.integers(0, 50), min_size=12, max_size=12))
    units = []
    for index in range(num_units):
        keys = draw(st.sets(st.integers(0, 11), max_size=3))
        units.append(
            UnitCost(
                f"u{index}",
                {key: sizes[key] for key in keys},
                activation_bytes=draw(st.integers(0, 50)),
                time=float(draw(st.integers(0, 50))),
            )
        )
    cuts = draw(st.lists(st.integers(0, 3), min_size=num_units, max_size=num_units))
    return Problem(units, num_stages, draw(st.sampled_from([0.0, 0.2, 0.8, 1.0])), cuts)


def spans(starts: list[int], num_units: int) -> list[tuple[int, int]]:
    return list(zip(starts, [*starts[1:], num_units], strict=True))


def bottleneck(problem: Problem, starts: list[int]) -> float:
    return max(problem.stage_cost(*span) for span in spans(starts, len(problem.units)))


def crossing(problem: Problem, starts: list[int]) -> int:
    return sum(problem.cut_bytes[start] for start in starts[1:])


def all_partitions(problem: Problem) -> list[list[int]]:
    cuts = itertools.combinations(range(1, len(problem.units)), problem.num_stages - 1)
    return [[0, *cut] for cut in cuts]


@given(problems())
def test_no_partition_has_a_smaller_bottleneck_and_none_as_good_cuts_fewer_bytes(problem):
    found = solve(problem)
    assert found in all_partitions(problem)
    best = min(bottleneck(problem, starts) for starts in all_partitions(problem))
    assert bottleneck(problem, found) <= best + TOLERANCE
    optimal = [starts for starts in all_partitions(problem) if bottleneck(problem, starts) <= best + TOLERANCE]
    assert crossing(problem, found) == min(crossing(problem, starts) for starts in optimal)


@given(problems())
def test_the_solution_is_the_same_each_time(problem):
    assert solve(problem) == solve(problem)


def even(num_units: int, num_stages: int, cut_bytes: list[int] | None = None) -> Problem:
    units = [UnitCost(f"u{i}", {i: 10}, 0, 1.0) for i in range(num_units)]
    return Problem(units, num_stages, 0.5, cut_bytes or [0] * num_units)


def test_equal_units_are_spread_evenly():
    assert solve(even(8, 4)) == [0, 2, 4, 6]


def test_among_equal_bottlenecks_the_rest_is_spread_evenly():
    # Two stages get two units in any case; the cuts are free, so no stage should be left with none to spare.
    assert [end - begin for begin, end in spans(solve(even(7, 4)), 7)] in ([1, 2, 2, 2], [2, 1, 2, 2], [2, 2, 1, 2])


def test_among_equal_bottlenecks_the_cheapest_cut_wins():
    assert solve(even(3, 2, [0, 8, 4])) == [0, 2]
    assert solve(even(3, 2, [0, 4, 8])) == [0, 1]


def test_a_parameter_that_units_of_one_stage_share_counts_once():
    shared = [UnitCost("embed", {0: 100}, 0, 0.0), UnitCost("mid", {1: 60}, 0, 0.0), UnitCost("head", {0: 100}, 0, 0.0)]
    problem = Problem(shared, 1, 1.0, [0, 0, 0])
    assert problem.stage_memory(0, 3) == 4 * 160
    assert problem.stage_memory(0, 2) == 4 * 160
    assert problem.stage_memory(2, 3) == 4 * 100


def test_more_stages_than_units_are_refused():
    with pytest.raises(ConfigError, match=r"\(3\) must not be larger than the number of units .* \(2: u0, u1\)"):
        solve(even(2, 3))


def test_units_without_any_cost_can_be_placed():
    assert solve(Problem([UnitCost(name, {}, 0, 0.0) for name in "abc"], 3, 0.8, [0, 0, 0])) == [0, 1, 2]
