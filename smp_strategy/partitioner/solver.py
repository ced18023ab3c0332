"""The solver: best-first branch and bound over contiguous partitions, with a certificate.

Chunks are cut off one after the other. What is known about the units that are placed, and the best that could become
of the rest (dynamic programming over chunks and units), bounds the cost of everything that a beginning can lead to
(:mod:`smp_strategy.partitioner.bounds`). The beginning with the smallest bound is looked at first; a whole partition is
simulated; what cannot beat the best one found is dropped. When nothing is left the best is proven to be optimal.

The number of simulations is limited (not their time: every rank decides alike). Beyond it the answer carries the bound
that remains, so it is known how much a longer search could gain at most. Among equal costs the fewest bytes across cuts
win, then the most even stages, then the earliest cuts.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from smp_strategy.errors import ConfigError
from smp_strategy.partitioner.bounds import Bounds, Load
from smp_strategy.partitioner.problem import Problem, Score

__all__ = ["Evaluate", "Solution", "solve"]

Evaluate = Callable[[Mapping[str, int]], Score]
"""Simulates a step under an assignment of units to stages."""

# Costs are 1 where everything is ideal; what differs by less is the same but for rounding.
TOLERANCE = 1e-11
# Simulations whose bound equals the best cost, to find a candidate as good with cheaper cuts.
MOST_TIES = 8
# Beginnings that are looked at; few compared with a simulation, but they take memory.
MOST_BEGINNINGS = 50_000


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
        return self.lower_bound >= self.cost - TOLERANCE


def solve(
    problem: Problem, evaluate: Evaluate, *, budget: int = 200, guesses: Sequence[Mapping[str, int]] = ()
) -> Solution:
    """The partition of least cost.

    Args:
        problem: units, where their chunks go, and what counts.
        evaluate: simulates a candidate.
        budget: most simulations.
        guesses: assignments to begin with; one that is better than all contiguous partitions is the answer.

    Raises:
        ConfigError: there are more chunks than units, or nothing fits the limits of memory.
    """
    _check_sizes(problem)
    search = _Search(problem, evaluate, budget)
    for guess in guesses:
        search.try_out(guess, ())
    search.run()
    if search.best is None:
        fullest = _Search(problem, evaluate, budget, minimises_fullness=True)
        fullest.run()
        assert fullest.best is not None
        if fullest.best.cost > 1.0 + TOLERANCE:
            raise _nothing_fits(problem, fullest)
        search.try_out(fullest.best.stage_of, ())
    best = search.best
    assert best is not None
    return Solution(
        stage_of=best.stage_of,
        score=best.score,
        cost=best.cost,
        lower_bound=min(search.lower_bound, best.cost),
        num_evaluations=search.num_evaluations,
    )


def equal_counts(num_units: int, num_chunks: int) -> list[int]:
    """First unit of each chunk, if all have the same number of units; the last ones get one more."""
    return [chunk * num_units // num_chunks for chunk in range(num_chunks)]


def _check_sizes(problem: Problem) -> None:
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


def _nothing_fits(problem: Problem, search: "_Search") -> ConfigError:
    assert search.best is not None
    memory = problem.memory(search.best.stage_of, search.best.score)
    limits = [problem.setting.limit(stage) for stage in range(problem.setting.num_stages)]
    rows = ", ".join(
        f"stage {stage}: {peak:,} of {'any' if limit is None else format(limit, ',')}"
        for stage, (peak, limit) in enumerate(zip(memory, limits, strict=True))
    )
    return ConfigError(
        f"No partition fits `memory_limit`. The nearest one needs {max(memory):,} bytes on its fullest stage (bytes "
        f"that are needed and allowed: {rows}). Use more stages (`pipeline_parallel_degree`), more and so smaller "
        "`microbatches`, fewer `active_microbatches` in flight, a schedule that holds fewer (`pipeline: 1f1b`), or "
        "raise the limit."
    )


class _Candidate(NamedTuple):
    """A simulated partition; the smallest is the best."""

    rounded_cost: float
    cut_bytes: int
    unevenness: float
    starts: tuple[int, ...]
    cost: float
    stage_of: Mapping[str, int]
    score: Score


class _Beginning(NamedTuple):
    """The first chunks of a partition; the smallest is looked at next."""

    bound: float
    chunks_left: int
    cut_bytes: int
    unevenness: float
    starts: tuple[int, ...]
    end: int
    """First unit that is not placed."""
    seconds: tuple[float, ...]
    """Bound of each stage."""
    memory: tuple[float, ...]
    loads: tuple[Load, ...]


@final
class _Search:
    """Branch and bound.

    Args:
        problem: what is solved.
        evaluate: simulates a candidate.
        budget: most simulations.
        minimises_fullness: of the stages against their limits, instead of the cost under them.
    """

    def __init__(self, problem: Problem, evaluate: Evaluate, budget: int, *, minimises_fullness: bool = False) -> None:
        self._problem = problem
        self._evaluate = evaluate
        self._budget = budget
        self._minimises_fullness = minimises_fullness
        self._bounds = Bounds(problem)
        self._spans = self._bounds.spans()
        self._remaining = self._bounds.remaining()
        self._chunks = problem.setting.stage_of_chunk
        self._is_last = [stage not in self._chunks[chunk + 1 :] for chunk, stage in enumerate(self._chunks)]
        self._rest = self._best_of_rest()
        self._tried: set[tuple[int, ...]] = set()
        self.best: _Candidate | None = None
        self.lower_bound = 0.0
        self.num_evaluations = 0

    def run(self) -> None:
        """Search until the best is proven, or the budget is used up."""
        num_stages, num_units = self._problem.setting.num_stages, len(self._problem.units)
        self.try_out_starts(tuple(equal_counts(num_units, len(self._chunks))))
        nothing = (0.0,) * num_stages
        root = _Beginning(0.0, len(self._chunks), 0, 0.0, (), 0, nothing, nothing, (Load(),) * num_stages)
        heap, looked_at, ties = [root], 0, 0
        while heap and self.num_evaluations < self._budget and looked_at < MOST_BEGINNINGS:
            is_tie = self.best is not None and heap[0].bound >= self.best.rounded_cost
            if is_tie and (ties == MOST_TIES or self._is_worse(heap[0].bound)):
                break
            beginning = heapq.heappop(heap)
            looked_at += 1
            if beginning.chunks_left == 0:
                ties += is_tie
                self.try_out_starts(beginning.starts)
                continue
            for following in self._extended(beginning):
                if not self._is_worse(following.bound):
                    heapq.heappush(heap, following)
        self.lower_bound = heap[0].bound if heap else float("inf")

    def _is_worse(self, bound: float) -> bool:
        return self.best is not None and bound > self.best.rounded_cost

    def try_out_starts(self, starts: tuple[int, ...]) -> None:
        """Simulate the partition whose chunks begin at ``starts``, once."""
        if starts not in self._tried:
            self._tried.add(starts)
            self.try_out(self._problem.stage_of(starts), starts)

    def try_out(self, stage_of: Mapping[str, int], starts: tuple[int, ...]) -> None:
        """Simulate an assignment; it is the best if it fits and none has been better."""
        problem = self._problem
        score = self._evaluate(stage_of)
        self.num_evaluations += 1
        memory = problem.memory(stage_of, score)
        if self._minimises_fullness:
            cost = max(map(self._fullness, range(len(memory)), memory))
        elif problem.fits(memory):
            cost = problem.cost(score.step_seconds, max(memory))
        else:
            return
        cuts = sum(
            problem.cut_bytes[number]
            for number in range(1, len(problem.units))
            if stage_of[problem.units[number].name] != stage_of[problem.units[number - 1].name]
        )
        loads = [0.0] * problem.setting.num_stages
        for unit in problem.units:
            loads[stage_of[unit.name]] += sum(unit.work)
        unevenness = sum(load * load for load in loads)
        found = _Candidate(_rounded(cost), cuts, unevenness, starts, cost, stage_of, score)
        if self.best is None or found[:4] < self.best[:4]:
            self.best = found

    def _fullness(self, stage: int, memory: float) -> float:
        limit = self._problem.setting.limit(stage)
        return 0.0 if limit is None else memory / max(limit, 1)

    def _extended(self, beginning: _Beginning) -> "list[_Beginning]":
        """``beginning`` with one chunk more, of every length that leaves a unit for each of the others."""
        chunk, begin = len(beginning.starts), beginning.end
        stage, left = self._chunks[chunk], beginning.chunks_left - 1
        num_units = len(self._problem.units)
        cut_bytes = beginning.cut_bytes + (self._problem.cut_bytes[begin] if chunk else 0)
        found = []
        for end in range(begin + 1, num_units - left + 1) if left else [num_units]:
            load = beginning.loads[stage].joined(self._spans[begin][end - begin - 1])
            if not self._minimises_fullness and not self._bounds.fits(stage, load):
                break
            seconds = self._seconds(chunk, load, end)
            memory = self._memory(stage, load)
            all_seconds = (*beginning.seconds[:stage], seconds, *beginning.seconds[stage + 1 :])
            all_memory = (*beginning.memory[:stage], memory, *beginning.memory[stage + 1 :])
            loads = (*beginning.loads[:stage], load, *beginning.loads[stage + 1 :])
            bound = self._bound(max(all_seconds), max(all_memory), left, end)
            if bound == float("inf"):
                continue
            unevenness = beginning.unevenness + seconds * seconds
            starts = (*beginning.starts, begin)
            found.append(_Beginning(bound, left, cut_bytes, unevenness, starts, end, all_seconds, all_memory, loads))
        return found

    def _seconds(self, chunk: int, load: Load, end: int) -> float:
        """Bound of the stage of ``chunk``, which will get more units if this is not its last chunk."""
        if not self._is_last[chunk]:
            load = load.relaxed(self._remaining[end])
        return self._bounds.seconds(self._chunks[chunk], load)

    def _memory(self, stage: int, load: Load) -> float:
        memory = self._bounds.memory(stage, load)
        return self._fullness(stage, memory) if self._minimises_fullness else memory

    def _cost(self, seconds: float, memory: float) -> float:
        return memory if self._minimises_fullness else self._problem.cost(seconds, memory)

    def _bound(self, seconds: float, memory: float, left: int, end: int) -> float:
        rest_seconds, rest_memory, rest_cost = self._rest[left][end]
        bound = self._cost(max(seconds, rest_seconds), max(memory, rest_memory))
        return _rounded(max(bound, rest_cost))

    def _best_of_rest(self) -> list[list[tuple[float, float, float]]]:
        """Entry ``[k][i]``: if the last ``k`` chunks share the units from ``i`` on, the least that any way of cutting
        them makes of the slowest stage, the fullest one, and the one that costs most."""
        num_units, never = len(self._problem.units), float("inf")
        none = (never, never, never)
        rest = [[none] * num_units + [(0.0, 0.0, 0.0)]]
        everything = self._remaining[0]
        for left in range(1, len(self._chunks) + 1):
            chunk = len(self._chunks) - left
            stage = self._chunks[chunk]
            is_alone = self._is_last[chunk] and stage not in self._chunks[:chunk]
            row = [none] * (num_units + 1)
            for begin in range(chunk, num_units - left + 1):
                best = none
                for end in range(begin + 1, num_units - left + 2):
                    load = self._spans[begin][end - begin - 1]
                    if not self._minimises_fullness and not self._bounds.fits(stage, load):
                        break
                    seconds = self._bounds.seconds(stage, load if is_alone else load.relaxed(everything))
                    memory = self._memory(stage, load)
                    later = rest[left - 1][end]
                    cost = max(self._cost(seconds, memory), later[2])
                    best = (
                        min(best[0], max(seconds, later[0])),
                        min(best[1], max(memory, later[1])),
                        min(best[2], cost),
                    )
                row[begin] = best
            rest.append(row)
        return rest


def _rounded(cost: float) -> float:
    return round(cost, 11)
