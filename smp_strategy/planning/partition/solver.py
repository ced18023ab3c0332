"""The solver: the best contiguous partition, and a certificate of how good any could be.

A search (:mod:`smp_strategy.planning.partition.branch_and_bound`) relies on what the schedule promises about
microbatches in flight, which is more where the program never comes back to a stage than where it does. Promises about
memory are weak, so where memory counts, another search comes first and goes by what is merely likely: it proves nothing
and finds good candidates early. The number of simulations is limited (not their time: every rank decides alike); beyond
it the answer carries the bound that remains, so it is known what a longer search could gain at most.

Among equal costs the fewest bytes across cuts win, then the most even stages, then the earliest cuts.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from smp_strategy.errors import ConfigError
from smp_strategy.planning.partition.branch_and_bound import Search
from smp_strategy.planning.partition.evaluation import Evaluate, PartitionEvaluator, rounded
from smp_strategy.planning.partition.problem import PartitionProblem, Promise, Score
from smp_strategy.planning.partition.sagemaker_tree import segments

__all__ = ["EFFORT", "Solution", "does_not_fit", "equal_counts", "solve"]

# Share of the simulations that go to candidates that are merely likely to be good.
SHARE_OF_GUESSES = 0.3
# Share after which the search for a proof gives way to small changes of the best.
SHARE_OF_SEARCHES = 0.6
# Simulating takes time in proportion to actions times stages; this many altogether take a second or two.
EFFORT = 150_000


@final
@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best partition that was found, and how good any could be."""

    stage_of: Mapping[str, int]
    score: Score
    cost: float
    lower_bound: float
    """No contiguous partition costs less."""
    num_evaluations: int

    @property
    def is_optimal(self) -> bool:
        """Whether nothing better exists, by proof."""
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
        problem: units, where their chunks go, and what counts.
        evaluate: simulates a candidate.
        budget: most simulations; ``None``: as many as ``effort`` allows.
        effort: actions times stages, of all simulations.
        guesses: assignments to begin with; one that is better than all contiguous partitions is the answer.

    Raises:
        ConfigError: there are more chunks than units, or nothing fits the limits of memory.
    """
    _check_sizes(problem)
    if budget is None:
        setting = problem.setting
        budget = max(24, effort // (setting.num_microbatches * len(setting.stage_of_chunk) * setting.num_stages))
    judge = PartitionEvaluator(problem, evaluate, budget)
    for guess in guesses:
        judge.try_out(guess)
    lower_bound = _searched(judge)
    if judge.best is None:
        fullest = PartitionEvaluator(problem, evaluate, budget, counts_fullness=True)
        _searched(fullest)
        assert fullest.best is not None
        memory = problem.memory(fullest.best.stage_of, fullest.best.score)
        if not problem.fits(memory):
            limits = [problem.setting.limit(stage) for stage in range(problem.setting.num_stages)]
            raise does_not_fit("No partition fits", memory, limits)
        judge.try_out(fullest.best.stage_of)
    best = judge.best
    assert best is not None
    return Solution(
        stage_of=best.stage_of,
        score=best.score,
        cost=best.cost,
        lower_bound=min(lower_bound, best.cost),
        num_evaluations=judge.num_evaluations,
    )


def _searched(judge: PartitionEvaluator) -> float:
    """Look for the best; returns the lower bound."""
    problem, setting = judge.problem, judge.problem.setting
    num_chunks = len(setting.stage_of_chunk)
    judge.try_out(problem.stage_of(equal_counts(len(problem.units), num_chunks)))
    judge.try_out(problem.stage_of(segments([sum(unit.work) for unit in problem.units], num_chunks)))
    flights = [setting.flight(stage) for stage in range(setting.num_stages)]
    promised = [flight.on_chain if problem.is_chain else flight.always for flight in flights]
    memory_counts = setting.memory_weight > 0 or any(limit is not None for limit in setting.memory_limits)
    if memory_counts and any(f.likely > p.least for f, p in zip(flights, promised, strict=True)):
        likely = [Promise(flight.likely, flight.likely) for flight in flights]
        Search(judge, likely.__getitem__).run(int(SHARE_OF_GUESSES * judge.budget))
    search = Search(judge, promised.__getitem__)
    lower_bound = search.run(int(SHARE_OF_SEARCHES * judge.budget))
    if judge.is_as_good_as(lower_bound):
        return lower_bound
    _climb(judge)
    # From the beginning, but what is simulated already costs nothing, and the best may be better now.
    return max(lower_bound, search.run(judge.budget))


def _climb(judge: PartitionEvaluator) -> None:
    """Move borders of the best by one unit, as long as that makes it better."""
    problem, num_chunks = judge.problem, len(judge.problem.setting.stage_of_chunk)
    while judge.best is not None:
        stages, before = judge.best.stages, judge.best.rounded_cost
        starts = [0, *(index for index in range(1, len(stages)) if stages[index] != stages[index - 1])]
        if len(starts) != num_chunks:  # one from outside, or two chunks of a stage that meet
            return
        for chunk, step in itertools.product(range(1, num_chunks), (-1, 1)):
            moved = [*starts[:chunk], starts[chunk] + step, *starts[chunk + 1 :], len(stages)]
            if judge.is_exhausted:
                return
            if moved[chunk - 1] < moved[chunk] < moved[chunk + 1]:
                judge.try_out(problem.stage_of(moved[:-1]))
        if judge.best.rounded_cost >= before:
            return


def equal_counts(num_units: int, num_chunks: int) -> list[int]:
    """First unit of each chunk, if all have the same number of units; the last ones get one more."""
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
    """The error that ``what`` needs more memory than there is, with bytes per stage."""
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
