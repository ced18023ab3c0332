"""Best-first branch and bound over contiguous partitions.

Chunks are cut off one after the other. What is known about the units that are placed, and the best that could become
of the rest (dynamic programming over chunks and units), bounds the cost of everything that a beginning can lead to. The
beginning with the smallest bound is looked at first, the longer one of two; a whole partition is simulated; what cannot
beat the best one found is dropped. When nothing is left the best is proven.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple, final

from smp_strategy.planning.partition.bounds import Bounds, StageUnits
from smp_strategy.planning.partition.evaluation import PartitionEvaluator, rounded
from smp_strategy.planning.partition.problem import Promise

__all__ = ["Search"]

# Simulations whose bound equals the best cost, to find a candidate as good with cheaper cuts.
MOST_TIES = 8
# Beginnings that are made; together they take about a second.
MOST_BEGINNINGS = 100_000
NEVER = float("inf")


class _Prefix(NamedTuple):
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
    loads: tuple[StageUnits, ...]


@final
class Search:
    """One search.

    Args:
        judge: simulates candidates and keeps the best.
        promise: microbatches in flight on a stage, at least and at most.
    """

    def __init__(self, judge: PartitionEvaluator, promise: Callable[[int], Promise]) -> None:
        self._judge = judge
        self._problem = judge.problem
        self._bounds = Bounds(self._problem, promise)
        self._spans = self._bounds.spans()
        self._remaining = self._bounds.remaining()
        self._chunks = self._problem.setting.stage_of_chunk
        self._is_last = [stage not in self._chunks[chunk + 1 :] for chunk, stage in enumerate(self._chunks)]
        self._ideal = self._bounds.ideal_seconds()
        self._rest = self._best_of_rest()

    def run(self, budget: int) -> float:
        """Search until the best is proven, or ``budget`` simulations are made altogether.

        Returns:
            A lower bound of the cost of what was not simulated and is not worse than the best.
        """
        judge, num_stages = self._judge, self._problem.setting.num_stages
        nothing = (0.0,) * num_stages
        heap = [_Prefix(0.0, len(self._chunks), 0, 0.0, (), 0, nothing, nothing, (StageUnits(),) * num_stages)]
        made, ties = 0, 0
        while heap and judge.num_evaluations < budget and made < MOST_BEGINNINGS:
            is_tie = judge.is_as_good_as(heap[0].bound)
            if is_tie and (ties == MOST_TIES or judge.beats(heap[0].bound)):
                break
            beginning = heapq.heappop(heap)
            if beginning.chunks_left == 0:
                ties += is_tie
                judge.try_out(self._problem.stage_of(beginning.starts))
                continue
            for following in self._extended(beginning):
                made += 1
                if not judge.beats(following.bound):
                    heapq.heappush(heap, following)
        return heap[0].bound if heap else NEVER

    def _extended(self, beginning: _Prefix) -> list[_Prefix]:
        """``beginning`` with one chunk more, of every length that leaves a unit for each of the others."""
        chunk, begin = len(beginning.starts), beginning.end
        stage, left = self._chunks[chunk], beginning.chunks_left - 1
        cut_bytes = beginning.cut_bytes + (self._problem.cut_bytes[begin] if chunk else 0)
        starts = (*beginning.starts, begin)
        found = []
        for end in self._ends(begin, left):
            load = beginning.loads[stage].joined(self._spans[begin][end - begin - 1])
            if not self._fits(stage, load):
                break
            seconds = self._seconds(chunk, load, end)
            memory = self._memory(stage, load)
            all_seconds = (*beginning.seconds[:stage], seconds, *beginning.seconds[stage + 1 :])
            all_memory = (*beginning.memory[:stage], memory, *beginning.memory[stage + 1 :])
            loads = (*beginning.loads[:stage], load, *beginning.loads[stage + 1 :])
            bound = self._bound(max(all_seconds), max(all_memory), left, end)
            if bound < NEVER:
                unevenness = beginning.unevenness + seconds * seconds
                found.append(_Prefix(bound, left, cut_bytes, unevenness, starts, end, all_seconds, all_memory, loads))
        return found

    def _ends(self, begin: int, left: int) -> range:
        """Where a chunk that begins at ``begin`` may end, if ``left`` more follow."""
        num_units = len(self._problem.units)
        return range(begin + 1 if left else num_units, num_units - left + 1)

    def _fits(self, stage: int, load: StageUnits) -> bool:
        return self._judge.counts_fullness or self._bounds.fits(stage, load)

    def _seconds(self, chunk: int, load: StageUnits, end: int) -> float:
        """Bound of the stage of ``chunk``, which will get more units if this is not its last chunk."""
        if not self._is_last[chunk]:
            load = load.relaxed(self._remaining[end])
        return self._bounds.seconds(self._chunks[chunk], load)

    def _memory(self, stage: int, load: StageUnits) -> float:
        memory = self._bounds.memory(stage, load)
        return self._judge.fullness(stage, memory) if self._judge.counts_fullness else memory

    def _cost(self, seconds: float, memory: float) -> float:
        return memory if self._judge.counts_fullness else self._problem.cost(seconds, memory)

    def _bound(self, seconds: float, memory: float, left: int, end: int) -> float:
        rest_seconds, rest_memory, rest_cost = self._rest[left][end]
        bound = self._cost(max(seconds, rest_seconds, self._ideal), max(memory, rest_memory))
        return rounded(max(bound, rest_cost))

    def _best_of_rest(self) -> list[list[tuple[float, float, float]]]:
        """Entry ``[k][i]``: if the last ``k`` chunks share the units from ``i`` on, the least that any way of cutting
        them makes of the slowest stage, the fullest one, and the one that costs most."""
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
            # A stage of several chunks may have any units beside these.
            seconds = self._bounds.seconds(stage, load if is_alone else load.relaxed(self._remaining[0]))
            memory = self._memory(stage, load)
            then = later[end]
            best = (
                min(best[0], max(seconds, then[0])),
                min(best[1], max(memory, then[1])),
                min(best[2], max(self._cost(seconds, memory), then[2])),
            )
        return best
