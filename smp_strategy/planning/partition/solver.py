"""Partition solver: the best contiguous partition by branch and bound, with a lower bound as a certificate.

The search (:mod:`smp_strategy.planning.partition.branch_and_bound`) relies on guaranteed bounds on microbatches in
flight, which are tighter for programs that never come back to a stage. Guarantees about memory are weak, so if memory
counts, a first search uses estimates instead: it proves nothing, but finds good candidates early. The number of
simulations is limited (not their time: all ranks must decide alike). Beyond it, the solution has the remaining lower
bound, which limits the gain of a longer search.

Ties go to the fewest bytes across cuts, then to the most even stages, then to the earliest cuts.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from smp_strategy.errors import ConfigError
from smp_strategy.planning.partition.branch_and_bound import Evaluate, PartitionEvaluator, Search, rounded
from smp_strategy.planning.partition.problem import PartitionProblem, Promise, Score
from smp_strategy.planning.partition.sagemaker_tree import segments

__all__ = ["EFFORT", "Solution", "does_not_fit", "equal_counts", "solve"]

# Share of the simulations for the search by estimates.
SHARE_OF_GUESSES = 0.3
# Share of the simulations after which the search for a proof gives way to hill climbing.
SHARE_OF_SEARCHES = 0.6
# Budget in actions times stages, to which the time of simulations is proportional: a second or two. See [Note: same
# decision on every rank].
EFFORT = 150_000
LEAST_SIMULATIONS = 6


@final
@dataclass(frozen=True, kw_only=True)
class Solution:
    """Best partition found, with a lower bound on the cost of all partitions."""

    stage_of: Mapping[str, int]
    score: Score
    cost: float
    lower_bound: float
    """Lower bound on the cost of any contiguous partition."""
    num_evaluations: int

    @property
    def is_optimal(self) -> bool:
        """Whether the partition is proven optimal."""
        return rounded(self.lower_bound) >= rounded(self.cost)


def solve(
    problem: PartitionProblem,
    evaluate: Evaluate,
    *,
    budget: int | None = None,
    effort: int = EFFORT,
    guesses: Sequence[Mapping[str, int]] = (),
) -> Solution:
    """The partition of least cost.

    Args:
        problem: Partitioning problem.
        evaluate: Simulation of a candidate.
        budget: Most simulations; ``None``: as many as ``effort`` allows.
        effort: Budget of all simulations in actions times stages.
        guesses: Assignments to start from, contiguous or not; one that beats all contiguous ones is the solution.

    Raises:
        ConfigError: there are more chunks than units, or nothing fits the limits of memory.
    """
    _check_sizes(problem)
    setting = problem.setting
    affordable = effort // (setting.num_microbatches * len(setting.stage_of_chunk) * setting.num_stages)
    enough = max(affordable, min(24, 4 * affordable), LEAST_SIMULATIONS)
    budget = enough if budget is None else min(budget, enough)
    evaluator = PartitionEvaluator(problem, evaluate, budget)
    for guess in guesses if budget > 2 * LEAST_SIMULATIONS else ():
        evaluator.try_out(guess)
    lower_bound = _searched(evaluator)
    if evaluator.best is None:
        fullest = PartitionEvaluator(problem, evaluate, budget, counts_fullness=True)
        _searched(fullest)
        assert fullest.best is not None
        memory = problem.memory(fullest.best.stage_of, fullest.best.score)
        if not problem.fits(memory):
            limits = [problem.setting.limit(stage) for stage in range(problem.setting.num_stages)]
            raise does_not_fit("No partition fits", memory, limits)
        evaluator.try_out(fullest.best.stage_of)
    best = evaluator.best
    assert best is not None
    return Solution(
        stage_of=best.stage_of,
        score=best.score,
        cost=best.cost,
        lower_bound=min(lower_bound, best.cost),
        num_evaluations=evaluator.num_evaluations,
    )


def _searched(evaluator: PartitionEvaluator) -> float:
    """Run all searches; returns the lower bound."""
    problem, setting = evaluator.problem, evaluator.problem.setting
    num_chunks = len(setting.stage_of_chunk)
    # The better one usually comes first, which may spare the simulation of the other one.
    evaluator.try_out(problem.stage_of(segments([sum(unit.work) for unit in problem.units], num_chunks)))
    evaluator.try_out(problem.stage_of(equal_counts(len(problem.units), num_chunks)))
    flights = [setting.flight(stage) for stage in range(setting.num_stages)]
    promised = [flight.on_chain if problem.is_chain else flight.always for flight in flights]
    memory_counts = setting.memory_weight > 0 or any(limit is not None for limit in setting.memory_limits)
    if memory_counts and any(f.likely > p.least for f, p in zip(flights, promised, strict=True)):
        likely = [Promise(flight.likely, flight.likely) for flight in flights]
        Search(evaluator, likely.__getitem__).run(int(SHARE_OF_GUESSES * evaluator.budget))
    search = Search(evaluator, promised.__getitem__)
    lower_bound = search.run(int(SHARE_OF_SEARCHES * evaluator.budget))
    if evaluator.is_as_good_as(lower_bound):
        return lower_bound
    _climb(evaluator)
    # The search restarts, but simulated candidates are cached, and a better best prunes more.
    return max(lower_bound, search.run(evaluator.budget))


def _climb(evaluator: PartitionEvaluator) -> None:
    """Hill climbing: move borders of the best partition by one unit, as long as that improves it."""
    problem, num_chunks = evaluator.problem, len(evaluator.problem.setting.stage_of_chunk)
    while evaluator.best is not None:
        stages, before = evaluator.best.stages, evaluator.best.rounded_cost
        starts = [0, *(index for index in range(1, len(stages)) if stages[index] != stages[index - 1])]
        if len(starts) != num_chunks:  # a guess that is not contiguous, or two adjacent chunks of one stage
            return
        for chunk, step in itertools.product(range(1, num_chunks), (-1, 1)):
            moved = [*starts[:chunk], starts[chunk] + step, *starts[chunk + 1 :], len(stages)]
            if evaluator.is_exhausted:
                return
            if moved[chunk - 1] < moved[chunk] < moved[chunk + 1]:
                evaluator.try_out(problem.stage_of(moved[:-1]))
        if evaluator.best.rounded_cost >= before:
            return


def equal_counts(num_units: int, num_chunks: int) -> list[int]:
    """First unit of each chunk for chunks of equal numbers of units; the last ones get one more."""
    return [chunk * num_units // num_chunks for chunk in range(num_chunks)]


def _check_sizes(problem: PartitionProblem) -> None:
    num_units, num_chunks = len(problem.units), len(problem.setting.stage_of_chunk)
    if num_chunks > num_units:
        names = ", ".join(unit.name for unit in problem.units)
        num_stages = problem.setting.num_stages
        times = num_chunks // num_stages
        chunks = f" times `virtual_pipeline_degree` ({times})" if times > 1 else ""
        raise ConfigError(
            f"`pipeline_parallel_degree` ({num_stages}){chunks} must not be larger than the number of units that the "
            f"model can be cut into ({num_units}: {names})."
        )


def does_not_fit(what: str, needed: Sequence[int], allowed: Sequence[int | None]) -> ConfigError:
    """Error for a partition over the memory limit, with needed and allowed bytes per stage."""
    rows = ", ".join(
        f"stage {stage} {peak:,} of {'any' if limit is None else format(limit, ',')}"
        for stage, (peak, limit) in enumerate(zip(needed, allowed, strict=True))
    )
    return ConfigError(
        f"{what} `memory_limit`: {max(needed):,} bytes are needed on the fullest stage (needed and allowed: {rows}). "
        "Use more stages (`pipeline_parallel_degree`), more and so smaller `microbatches`, fewer `active_microbatches` "
        "in flight, a schedule that holds fewer (`pipeline: 1f1b`), spread units over replicas "
        "(`sharded_data_parallel_degree`), or raise the limit."
    )
