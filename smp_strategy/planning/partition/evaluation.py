"""Evaluation of candidate partitions: simulates each once, and keeps the best that fits."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

from smp_strategy.planning.partition.problem import PartitionProblem, Score

__all__ = ["Candidate", "Evaluate", "PartitionEvaluator", "rounded"]

Evaluate = Callable[[Mapping[str, int]], Score]
"""Simulation of a step under an assignment of units to stages."""


class Candidate(NamedTuple):
    """Simulated partition; smaller is better."""

    rounded_cost: float
    cut_bytes: int
    unevenness: float
    stages: tuple[int, ...]
    """Stage of each unit."""
    cost: float
    stage_of: Mapping[str, int]
    score: Score


@final
class PartitionEvaluator:
    """Simulation of candidates within a budget, with the best one so far.

    Args:
        problem: Partitioning problem.
        evaluate: Simulation of one candidate.
        budget: Most simulations.
        counts_fullness: Whether to minimize memory relative to the limit of the worst stage, instead of the cost.
    """

    def __init__(
        self, problem: PartitionProblem, evaluate: Evaluate, budget: int, *, counts_fullness: bool = False
    ) -> None:
        self.problem = problem
        self.counts_fullness = counts_fullness
        self.best: Candidate | None = None
        self.budget = budget
        self._evaluate = evaluate
        self._scores: dict[tuple[int, ...], Score] = {}

    @property
    def num_evaluations(self) -> int:
        """Number of simulations so far."""
        return len(self._scores)

    @property
    def is_exhausted(self) -> bool:
        """Whether the budget is used up."""
        return self.num_evaluations >= self.budget

    def beats(self, bound: float) -> bool:
        """Whether the best candidate is strictly better than any of cost ``bound`` or more."""
        return self.best is not None and bound > self.best.rounded_cost

    def is_as_good_as(self, bound: float) -> bool:
        """Whether no candidate of cost ``bound`` or more is better than the best."""
        return self.best is not None and bound >= self.best.rounded_cost

    def cost(self, seconds: float, memory: Sequence[float]) -> float:
        """Objective for a step time and the bytes of each stage."""
        if self.counts_fullness:
            return max(self.fullness(stage, peak) for stage, peak in enumerate(memory))
        return self.problem.cost(seconds, max(memory))

    def fullness(self, stage: int, memory: float) -> float:
        """``memory`` as a share of the limit of ``stage``."""
        limit = self.problem.setting.limit(stage)
        return 0.0 if limit is None else memory / max(limit, 1)

    def try_out(self, stage_of: Mapping[str, int]) -> None:
        """Simulate an assignment, and keep it if it fits and is better than the best so far."""
        problem = self.problem
        stages = tuple(stage_of[unit.name] for unit in problem.units)
        if stages in self._scores:
            return
        score = self._scores[stages] = self._evaluate(stage_of)
        memory = problem.memory(stage_of, score)
        if not self.counts_fullness and not problem.fits(memory):
            return
        cost = self.cost(score.step_seconds, memory)
        borders = [index for index in range(1, len(stages)) if stages[index] != stages[index - 1]]
        loads = [0.0] * problem.setting.num_stages
        for stage, unit in zip(stages, problem.units, strict=True):
            loads[stage] += sum(unit.work)
        found = Candidate(
            rounded(cost),
            sum(problem.cut_bytes[index] for index in borders),
            sum(load * load for load in loads),
            stages,
            cost,
            stage_of,
            score,
        )
        if self.best is None or found[:4] < self.best[:4]:
            self.best = found


def rounded(cost: float) -> float:
    """``cost``, which is 1 in the ideal case, rounded to 11 digits, so that the order of additions does not matter."""
    return round(cost, 11)
