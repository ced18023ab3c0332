"""Exact solution of the partitioning problem by dynamic programming.

Two passes over the cuts of the unit list. [1] The smallest possible cost of the most expensive stage,

    best(k, i) = min over j < i of max(best(k - 1, j), cost(j, i)),

where ``best(k, i)`` is over the first ``i`` units in ``k`` stages (Algorithm 2, equation 3 of arXiv:2111.05972).
[2] Among all partitions that reach it, the one with the fewest bytes across its cuts, and then the one whose stage
costs are most even (least sum of squares).
"""

from smp_strategy.errors import ConfigError
from smp_strategy.partition.problem import Problem

__all__ = ["solve"]

# Costs that differ by less than rounding are the same.
TOLERANCE = 1e-12


def solve(problem: Problem) -> list[int]:
    """Index of the first unit of each stage.

    Raises:
        ConfigError: there are more stages than units.
    """
    num_units, num_stages = len(problem.units), problem.num_stages
    if num_stages > num_units:
        raise ConfigError(
            f"`pipeline_parallel_degree` ({num_stages}) must not be larger than the number of units that the model "
            f"can be cut into ({num_units}: {', '.join(unit.name for unit in problem.units)})."
        )
    costs = {
        (begin, end): problem.stage_cost(begin, end)
        for begin in range(num_units)
        for end in range(begin + 1, num_units + 1)
    }
    bound = _smallest_maximum(costs, num_units, num_stages) + TOLERANCE
    return _cheapest_cuts(problem, costs, bound)


def _smallest_maximum(costs: dict[tuple[int, int], float], num_units: int, num_stages: int) -> float:
    best = {end: costs[0, end] for end in range(1, num_units + 1)}  # [1]
    for stages in range(2, num_stages + 1):
        best = {
            end: min(max(best[cut], costs[cut, end]) for cut in range(stages - 1, end))
            for end in range(stages, num_units + 1)
        }
    return best[num_units]


def _cheapest_cuts(problem: Problem, costs: dict[tuple[int, int], float], bound: float) -> list[int]:
    num_units = len(problem.units)
    Score = tuple[float, float]
    best: dict[int, tuple[Score, list[int]]] = {0: ((0.0, 0.0), [])}  # [2]
    for stage in range(problem.num_stages):
        reached: dict[int, tuple[Score, list[int]]] = {}
        for begin, ((cut_bytes, squares), starts) in best.items():
            for end in range(begin + 1, num_units + 1):
                cost = costs[begin, end]
                if cost > bound:
                    continue
                crossing = problem.cut_bytes[begin] if stage else 0
                candidate = ((cut_bytes + crossing, squares + cost * cost), [*starts, begin])
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    return best[num_units][1]
