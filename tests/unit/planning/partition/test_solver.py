"""Partition solver, against brute force."""

import pytest
from hypothesis import given, settings

from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.partition.problem import HeldBytes, Setting
from smp_strategy.planning.partition.solver import equal_counts, solve
from tests.unit.planning.partition.problems import Case, cases, chain

# Costs are rounded before they are compared: they are 1 where everything is ideal.
ROUNDING = 1e-10
ENOUGH = 100_000


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_contiguous_partition_is_better_and_that_is_proven(case: Case):
    costs = [case.cost(case.problem.stage_of(starts)) for starts in case.candidates()]
    feasible = [cost for cost in costs if cost is not None]
    if not feasible:
        with pytest.raises(ConfigError, match="No partition fits"):
            solve(case.problem, case.evaluate, budget=ENOUGH)
        return
    found = solve(case.problem, case.evaluate, budget=ENOUGH)
    assert found.cost == pytest.approx(min(feasible), rel=1e-9, abs=ROUNDING)
    assert case.cost(found.stage_of) == found.cost
    assert found.is_optimal
    assert found.lower_bound <= min(feasible) + ROUNDING


@settings(max_examples=30, deadline=None)
@given(cases())
def test_a_search_that_is_cut_short_says_what_could_be_better(case: Case):
    costs = [case.cost(case.problem.stage_of(starts)) for starts in case.candidates()]
    feasible = [cost for cost in costs if cost is not None]
    try:
        found = solve(case.problem, case.evaluate, budget=2)
    except ConfigError:
        return
    assert found.lower_bound <= min(feasible) + ROUNDING
    assert found.cost >= min(feasible) - ROUNDING
    if found.is_optimal:
        assert found.cost == pytest.approx(min(feasible), rel=1e-9, abs=ROUNDING)


def case_of(works, *, parameters=None, outputs=1, saved=1, **changes) -> Case:
    trace, work = chain(works, saved=saved, outputs=outputs)
    parameters = parameters or {f"u{i}": {i: HeldBytes(1)} for i in range(len(works))}
    setting = Setting.plain(**{"num_stages": 2, "num_microbatches": 4, **changes})
    return Case(trace, work, parameters, setting, active=4)


def sizes(case: Case, **options) -> list[int]:
    stages = list(solve(case.problem, case.evaluate, **options).stage_of.values())
    return [stages.count(stage) for stage in range(case.setting.num_stages)]


def test_equal_units_are_spread_evenly():
    assert sizes(case_of([Work(1, 1, 1)] * 8, num_stages=4)) == [2, 2, 2, 2]


def test_a_heavy_head_gets_a_stage_with_fewer_blocks():
    assert sizes(case_of([*[Work(1, 1, 1)] * 6, Work(4, 4, 4)])) == [5, 2]


def test_a_stage_that_is_twice_as_fast_gets_twice_as_much():
    assert sizes(case_of([Work(1, 1, 1)] * 9, stage_speeds=(1.0, 2.0), num_microbatches=32)) == [3, 6]


def test_of_two_partitions_that_take_as_long_the_one_with_the_cheaper_cut_wins():
    works = [Work(2, 2, 2), Work(0, 0, 0), Work(2, 2, 2)]
    trace, work = chain(works)
    for cheap in (0, 1):
        events = [
            event._replace(outputs=tuple(value._replace(nbytes=1 if index == cheap else 9) for value in event.outputs))
            for index, event in enumerate(trace.events)
        ]
        events = [
            event._replace(inputs=events[index - 1].outputs if index else ()) for index, event in enumerate(events)
        ]
        case = case_of(works)
        case = Case(type(trace)(events, trace.loss), work, {f"u{i}": {} for i in range(3)}, case.setting, 4)
        assert sizes(case) == ([1, 2] if cheap == 0 else [2, 1])


def test_a_partition_whose_fullest_stage_works_longer_than_the_best_step_takes_is_not_simulated():
    case = case_of([*[Work(1, 1, 1)] * 7, Work(7, 7, 7)], num_microbatches=32, memory_weight=0.0)
    tried = []
    found = solve(case.problem, lambda stage_of: tried.append(dict(stage_of)) or case.evaluate(stage_of), budget=ENOUGH)
    assert found.stage_of in tried
    # Four units, the heavy one among them, work 32 * 3 * 10 without waits.
    assert found.score.step_seconds < 32 * 3 * 10
    assert case.problem.stage_of(equal_counts(8, 2)) not in tried


def test_memory_that_must_fit_beats_time():
    heavy = {f"u{i}": {i: HeldBytes(100 if i < 2 else 1)} for i in range(6)}
    free = case_of([Work(1, 1, 1)] * 6, parameters=heavy)
    tight = case_of([Work(1, 1, 1)] * 6, parameters=heavy, memory_limits=(120, None))
    assert sizes(free) == [3, 3]
    assert sizes(tight) == [1, 5]


def test_tied_parameters_are_held_once_on_a_stage():
    tied = {"u0": {0: HeldBytes(100)}, "u1": {1: HeldBytes(60)}, "u2": {0: HeldBytes(100)}, "u3": {2: HeldBytes(60)}}
    problem = case_of([Work(1, 1, 1)] * 4, parameters=tied).problem
    stages = [problem.held(problem.stage_of(starts)) for starts in ([0, 1], [0, 3])]
    assert [[held.total for held in each] for each in stages] == [[100, 220], [160, 60]]


def test_a_partition_from_outside_wins_if_it_is_better_than_all_contiguous_ones():
    case = case_of([Work(1, 1, 1)] * 4, memory_weight=1.0, parameters={
        "u0": {0: HeldBytes(100)}, "u1": {1: HeldBytes(50)}, "u2": {2: HeldBytes(50)}, "u3": {0: HeldBytes(100)}
    })  # fmt: skip
    guess = {"u0": 0, "u1": 1, "u2": 1, "u3": 0}
    assert solve(case.problem, case.evaluate, guesses=[guess]).stage_of == guess
    assert solve(case.problem, case.evaluate).stage_of != guess


def test_where_nothing_fits_the_error_names_need_limit_and_remedies():
    case = case_of([Work(1, 1, 1)] * 4, memory_limits=(5, 3), saved=10)
    with pytest.raises(
        ConfigError, match=r"No partition fits `memory_limit`: \d+ bytes .*stage 0 \d+ of 5.*more stages"
    ):
        solve(case.problem, case.evaluate)


def test_more_stages_than_units_are_refused():
    case = case_of([Work(1, 1, 1)] * 2, num_stages=3)
    with pytest.raises(ConfigError, match=r"\(3\) must not be larger than the number of units .* \(2: u0, u1\)"):
        solve(case.problem, case.evaluate)


def test_more_chunks_than_units_are_refused():
    trace, work = chain([Work(1, 1, 1)] * 3)
    setting = Setting(num_stages=2, stage_of_chunk=(0, 1, 0, 1))
    case = Case(trace, work, {f"u{i}": {} for i in range(3)}, setting, active=4)
    with pytest.raises(ConfigError, match=r"\(2\) times `virtual_pipeline_degree` \(2\) must not be larger"):
        solve(case.problem, case.evaluate)


def test_units_without_any_cost_can_be_placed():
    assert sizes(case_of([Work()] * 3, num_stages=3)) == [1, 1, 1]


def test_the_solution_is_the_same_each_time_and_keeps_to_its_budget():
    case = case_of([Work(i % 3, i % 5, i % 2) for i in range(20)], num_stages=4)
    first, second = (solve(case.problem, case.evaluate, budget=7) for _ in range(2))
    assert first == second
    assert first.num_evaluations <= 7


def test_equal_counts_leave_the_larger_chunks_to_the_end():
    assert equal_counts(10, 4) == [0, 2, 5, 7]


def test_where_the_budget_ends_early_borders_are_moved_and_the_bound_stays():
    case = case_of([Work(1 + i, 2 + i % 5, 1 + i % 2) for i in range(18)], num_stages=5, num_microbatches=5)
    short, long = (solve(case.problem, case.evaluate, budget=budget) for budget in (20, ENOUGH))
    assert 0.8 < short.lower_bound <= long.cost <= short.cost
    assert short.cost < case.cost(case.problem.stage_of(equal_counts(18, 5)))
