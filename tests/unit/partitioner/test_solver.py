"""The solver against brute force."""

import pytest
from hypothesis import given, settings

from smp_strategy.errors import ConfigError
from smp_strategy.partitioner.solver import solve
from tests.unit.partitioner.problems import Case, cases

EXACT = 1e-9
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
    assert found.cost == pytest.approx(min(feasible), rel=EXACT)
    assert case.cost(found.stage_of) == found.cost
    assert found.is_optimal
    assert found.lower_bound <= min(feasible) + EXACT
