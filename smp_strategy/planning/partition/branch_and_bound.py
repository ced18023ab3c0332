"""Best-first branch and bound over contiguous partitions.

A node is a prefix: the first chunks of a partition. The loads of its stages, together with the best possible rest
(dynamic programming over chunks and units), bound the cost of all its completions. The prefix with the smallest bound
is expanded first, the longer one of two; complete partitions are simulated; prefixes that cannot beat the best
partition are pruned. When none is left, the best partition is proven optimal.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple, final

from smp_strategy.planning.partition.bounds import Bounds, StageUnits
from smp_strategy.planning.partition.evaluation import PartitionEvaluator, rounded
from smp_strategy.planning.partition.problem import Promise

__all__ = ["Search"]

# Most simulations of candidates whose bound equals the best cost, to find one as good with cheaper cuts.
MOST_TIES = 8
# Most prefixes; together they take about a second. A short search makes fewer of them.
MOST_PREFIXES = 100_000
PREFIXES_PER_SIMULATION = 500
NEVER = float("inf")


class _Prefix(NamedTuple):
    """First chunks of a partition; the smallest is expanded next."""

    bound: float
    chunks_left: int
    cut_bytes: int
    unevenness: float
    starts: tuple[int, ...]
    end: int
    """First unit that is not placed."""
    seconds: float
    """Lower bound of the slowest stage."""
    memory: float
    loads: tuple[StageUnits, ...]
    """Loads of the stages that have another chunk."""


class _Span(NamedTuple):
    """First chunk of a stage: a run of units, with the lower bounds of the stage."""

    end: int
    seconds: float
    memory: float
    load: StageUnits


@final
class Search:
    """Branch-and-bound search under given bounds on microbatches in flight.

    Args:
        evaluator: Simulation of candidates, with the best one so far.
        promise: Bounds on the microbatches in flight on each stage.
    """

    def __init__(self, evaluator: PartitionEvaluator, promise: Callable[[int], Promise]) -> None:
        self._evaluator = evaluator
        self._problem = evaluator.problem
        self._bounds = Bounds(self._problem, promise)
        self._spans = self._bounds.spans()
        self._remaining = self._bounds.remaining()
        self._chunks = self._problem.setting.stage_of_chunk
        self._is_last = [stage not in self._chunks[chunk + 1 :] for chunk, stage in enumerate(self._chunks)]
        self._ideal = self._bounds.ideal_seconds()
        self._rest = self._best_of_rest()
        self._first_chunks: dict[tuple[int, int], list[_Span]] = {}

    def run(self, budget: int) -> float:
        """Search until the best partition is proven, or until ``budget`` simulations have been made in total.

        Returns:
            Lower bound on the cost of all partitions that were neither simulated nor proven worse than the best.
        """
        evaluator = self._evaluator
        heap = [_Prefix(0.0, len(self._chunks), 0, 0.0, (), 0, 0.0, 0.0, ())]
        made, ties, most = 0, 0, min(MOST_PREFIXES, budget * PREFIXES_PER_SIMULATION)
        while heap and evaluator.num_evaluations < budget and made < most:
            # The best cost is proven once no bound is below it. A few ties are simulated for cheaper cuts.
            is_tie = evaluator.is_as_good_as(heap[0].bound)
            if is_tie and (ties == MOST_TIES or evaluator.beats(heap[0].bound)):
                break
            prefix = heapq.heappop(heap)
            if prefix.chunks_left == 0:
                ties += is_tie
                evaluator.try_out(self._problem.stage_of(prefix.starts))
                continue
            for following in self._extended(prefix):
                made += 1
                if not evaluator.beats(following.bound):
                    heapq.heappush(heap, following)
        return heap[0].bound if heap else NEVER

    def _extended(self, prefix: _Prefix) -> list[_Prefix]:
        """Children of ``prefix``: one more chunk, of every length that leaves a unit for each later chunk."""
        chunk, begin = len(prefix.starts), prefix.end
        stage, left = self._chunks[chunk], prefix.chunks_left - 1
        cut_bytes = prefix.cut_bytes + (self._problem.cut_bytes[begin] if chunk else 0)
        starts = (*prefix.starts, begin)
        if stage in self._chunks[:chunk]:
            spans = self._with(chunk, begin, prefix.loads[stage])
        else:
            # The bounds of a stage's first chunk do not depend on the chunks before: many prefixes share them.
            if (chunk, begin) not in self._first_chunks:
                self._first_chunks[chunk, begin] = self._with(chunk, begin, StageUnits())
            spans = self._first_chunks[chunk, begin]
        found = []
        for end, seconds, memory, load in spans:
            bound = self._bound(max(prefix.seconds, seconds), max(prefix.memory, memory), left, end)
            if bound < NEVER:
                loads = prefix.loads
                if not self._is_last[chunk]:
                    loads = loads or (StageUnits(),) * self._problem.setting.num_stages
                    loads = (*loads[:stage], load, *loads[stage + 1 :])
                found.append(
                    _Prefix(
                        bound,
                        left,
                        cut_bytes,
                        prefix.unevenness + seconds * seconds,
                        starts,
                        end,
                        max(prefix.seconds, seconds),
                        max(prefix.memory, memory),
                        loads,
                    )
                )
        return found

    def _with(self, chunk: int, begin: int, before: StageUnits) -> list[_Span]:
        """Runs of units from ``begin`` on as chunk ``chunk`` of a stage that has ``before``."""
        stage, left = self._chunks[chunk], len(self._chunks) - chunk - 1
        found = []
        for end in self._ends(begin, left):
            load = before.joined(self._spans[begin][end - begin - 1])
            if not self._fits(stage, load):
                break
            found.append(_Span(end, self._seconds(chunk, load, end), self._memory(stage, load), load))
        return found

    def _ends(self, begin: int, left: int) -> range:
        """Possible ends of a chunk that begins at ``begin`` and is followed by ``left`` more."""
        num_units = len(self._problem.units)
        return range(begin + 1 if left else num_units, num_units - left + 1)

    def _fits(self, stage: int, load: StageUnits) -> bool:
        return self._evaluator.counts_fullness or self._bounds.fits(stage, load)

    def _seconds(self, chunk: int, load: StageUnits, end: int) -> float:
        """Lower bound of the stage of ``chunk``, which gets more units unless this is its last chunk."""
        if not self._is_last[chunk]:
            load = load.relaxed(self._remaining[end])
        return self._bounds.seconds(self._chunks[chunk], load)

    def _memory(self, stage: int, load: StageUnits) -> float:
        memory = self._bounds.memory(stage, load)
        return self._evaluator.fullness(stage, memory) if self._evaluator.counts_fullness else memory

    def _cost(self, seconds: float, memory: float) -> float:
        return memory if self._evaluator.counts_fullness else self._problem.cost(seconds, memory)

    def _bound(self, seconds: float, memory: float, left: int, end: int) -> float:
        rest_seconds, rest_memory, rest_cost = self._rest[left][end]
        bound = self._cost(max(seconds, rest_seconds, self._ideal), max(memory, rest_memory))
        return rounded(max(bound, rest_cost))

    def _best_of_rest(self) -> list[list[tuple[float, float, float]]]:
        """Dynamic program over suffixes. Entry ``[k][i]`` has lower bounds for the last ``k`` chunks on the units from
        ``i`` on: time of the slowest stage, memory of the fullest one, cost of the most expensive one."""
        num_units = len(self._problem.units)
        none = (NEVER, NEVER, NEVER)
        rest = [[none] * num_units + [(0.0, 0.0, 0.0)]]
        for left in range(1, len(self._chunks) + 1):
            chunk = len(self._chunks) - left
            row = [none] * (num_units + 1)
            for begin in range(chunk, num_units - left + 1):
                row[begin] = self._best_of_chunk(chunk, begin, rest[-1])
            rest.append(row)
        return rest

    def _best_of_chunk(
        self, chunk: int, begin: int, later: list[tuple[float, float, float]]
    ) -> tuple[float, float, float]:
        stage, left = self._chunks[chunk], len(self._chunks) - chunk - 1
        is_alone = self._is_last[chunk] and stage not in self._chunks[:chunk]
        best = (NEVER, NEVER, NEVER)
        for end in self._ends(begin, left):
            load = self._spans[begin][end - begin - 1]
            if not self._fits(stage, load):
                break
            # A stage with several chunks may have any other units beside these.
            seconds = self._bounds.seconds(stage, load if is_alone else load.relaxed(self._remaining[0]))
            memory = self._memory(stage, load)
            then = later[end]
            best = (
                min(best[0], max(seconds, then[0])),
                min(best[1], max(memory, then[1])),
                min(best[2], max(self._cost(seconds, memory), then[2])),
            )
        return best
