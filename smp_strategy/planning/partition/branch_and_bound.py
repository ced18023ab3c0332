"""Best-first branch and bound over contiguous partitions.

A node is a prefix: the first chunks of a partition. The loads of its stages, together with the best possible rest
(dynamic programming over chunks and units), bound the cost of all its completions. The prefix with the smallest bound
is expanded first, the longer one of two; complete partitions are simulated; prefixes that cannot beat the best
partition are pruned. When none is left, the best partition is proven optimal.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

from smp_strategy.planning.partition.problem import HeldBytes, PartitionProblem, Promise, Score, Window

__all__ = ["Search", "Evaluate", "PartitionEvaluator", "rounded"]


Evaluate = Callable[[Mapping[str, int]], Score]
"""Simulation of a step under an assignment of units to stages."""


# --- evaluation ------------------------------------------------------------------------------------------------------
# Evaluation of candidate partitions: simulates each once, and keeps the best that fits.


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
        """Simulate an assignment that may be better than the best so far, and keep it if it is and fits."""
        problem = self.problem
        stages = tuple(stage_of[unit.name] for unit in problem.units)
        if stages in self._scores or self.beats(self._least_cost(stages, stage_of)):
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

    def _least_cost(self, stages: Sequence[int], stage_of: Mapping[str, int]) -> float:
        """Lower bound on the cost of an assignment: its fullest stage never waits, and keeps no activations."""
        problem, setting = self.problem, self.problem.setting
        seconds = [0.0] * setting.num_stages
        for stage, window in zip(stages, problem.windows, strict=True):
            seconds[stage] += setting.num_microbatches * sum(window.work) / setting.speed(stage)
        return rounded(self.cost(max(seconds), [held.total for held in problem.held(stage_of)]))


def rounded(cost: float) -> float:
    """``cost``, which is 1 in the ideal case, rounded to 11 digits, so that the order of additions does not matter."""
    return round(cost, 11)


# --- lower bounds ----------------------------------------------------------------------------------------------------
# Lower bounds on step time and memory of a stage, for any schedule; they prune the partition search.
#
# F, B and W are the forward work of a stage, the backward work that other stages wait for, and the weight gradients
# that only the optimizer waits for (per microbatch; W is part of B unless the schedule splits them, and B part of W on
# the stage where backward ends). With m microbatches a stage
#
# * works m (F + B + W);
# * waits at the beginning: for its first input (`head`), and before its first backward for the loss of the first
#   microbatch and the gradient's way from there (`back`). At most `most` forwards fill that time;
# * waits at the end: its last forward is followed by the way to the loss and back. At most `most` backwards fill that
#   time. Both waits add up if the last forward comes after the first backward, that is for m > `most`;
# * adds the work that follows its last backward on other stages (`tail`), unless weight gradients could fill that time;
# * holds its parameters, gradients and optimizer state, the bytes that every stage holds, and activations of `least`
#   microbatches.
#
# Ways through the program are longest paths of the trace, so the bounds hold for programs that branch.


NEVER = float("inf")


class StageUnits(NamedTuple):
    """Summed work and memory of the units of a stage."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    saved_bytes: int = 0
    held_bytes: int = 0
    """Bytes without parameters that several units of the model share, or that every stage holds."""
    shared: frozenset[int] = frozenset()
    head: float = NEVER
    after: float = NEVER
    back: float = NEVER
    tail: float = NEVER

    def joined(self, other: "StageUnits") -> "StageUnits":
        return StageUnits(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weight + other.weight,
            self.saved_bytes + other.saved_bytes,
            self.held_bytes + other.held_bytes,
            self.shared | other.shared if other.shared else self.shared,
            min(self.head, other.head),
            min(self.after, other.after),
            min(self.back, other.back),
            min(self.tail, other.tail),
        )

    def relaxed(self, other: "StageUnits") -> "StageUnits":
        """Weaker bound that still holds if any of the units of ``other`` are added."""
        return self._replace(
            head=min(self.head, other.head),
            after=min(self.after, other.after),
            back=min(self.back, other.back),
            tail=min(self.tail, other.tail),
        )


@final
class Bounds:
    """Lower bounds on time and memory of the stages of a problem."""

    def __init__(self, problem: PartitionProblem, promise: Callable[[int], Promise]) -> None:
        self._problem = problem
        self._promise = promise
        self._setting = problem.setting
        counts: dict[int, int] = {}
        for unit in problem.units:
            for key in unit.parameters:
                counts[key] = counts.get(key, 0) + 1
        self._shared: dict[int, HeldBytes] = {
            key: held
            for unit in problem.units
            for key, held in unit.parameters.items()
            if counts[key] > 1 and key not in problem.everywhere
        }
        self.loads = [self._load(index, window) for index, window in enumerate(problem.windows)]
        """Load of each unit alone."""

    def _load(self, index: int, window: Window) -> StageUnits:
        everywhere, parameters = self._problem.everywhere, self._problem.units[index].parameters
        alone = [held for key, held in parameters.items() if key not in self._shared and key not in everywhere]
        splits, work = self._setting.splits_backward, window.work
        return StageUnits(
            work.forward,
            work.input_gradient if splits else work.backward,
            work.weight_gradient if splits else 0.0,
            window.saved_bytes,
            sum(map(self._problem.at_least, alone)),
            frozenset(key for key in parameters if key in self._shared),
            *window[2:],
        )

    def spans(self) -> list[list[StageUnits]]:
        """Loads of all contiguous runs; entry ``[i][k]`` is that of ``k + 1`` units from unit ``i`` on."""
        found: list[list[StageUnits]] = []
        for begin in range(len(self.loads)):
            load, row = StageUnits(), []
            for unit in self.loads[begin:]:
                load = load.joined(unit)
                row.append(load)
            found.append(row)
        return found

    def remaining(self) -> list[StageUnits]:
        """Loads of all suffixes; entry ``[i]`` is that of all units from unit ``i`` on, the last one that of none."""
        found = [StageUnits()]
        for unit in reversed(self.loads):
            found.append(unit.joined(found[-1]))
        return found[::-1]

    def ideal_seconds(self) -> float:
        """Time of a step without any waiting."""
        setting, total = self._setting, self.remaining()[0]
        speed = sum(setting.speed(stage) for stage in range(setting.num_stages))
        return setting.num_microbatches * (total.forward + total.backward + total.weight) / speed

    def seconds(self, stage: int, load: StageUnits) -> float:
        """Lower bound on the time of a step."""
        setting, speed = self._setting, self._setting.speed(stage)
        count = setting.num_microbatches
        forward, backward, weight = load.forward / speed, load.backward / speed, load.weight / speed
        if load.head == NEVER:
            return 0.0
        if load.back == NEVER:
            return load.head + count * forward + load.tail
        if setting.splits_backward and not load.tail:
            # Backward ends here: no stage waits for any of it.
            backward, weight = 0.0, backward + weight
        most = min(self._promise(stage).most or count, count)
        begin = max(load.head, self._problem.critical_forward + load.back - most * forward)
        # From the last forward on: the loss, the way back, and one backward.
        last = load.after + load.back + backward
        if most < count:
            busy = begin + count * (forward + backward) + max(0.0, last - most * backward)
        else:
            busy = max(begin + count * (forward + backward), load.head + count * forward + last)
        return max(busy + load.tail, begin + count * (forward + backward + weight))

    def memory(self, stage: int, load: StageUnits) -> int:
        """Lower bound on peak bytes."""
        shared = sum(self._problem.at_least(self._shared[key]) for key in load.shared)
        held = load.held_bytes + shared + self._problem.everywhere_bytes
        return held + self._promise(stage).least * load.saved_bytes

    def fits(self, stage: int, load: StageUnits) -> bool:
        """Whether these units are within the memory limit of the stage, by the lower bound."""
        limit = self._setting.limit(stage)
        return limit is None or self.memory(stage, load) <= limit


# Most simulations of candidates whose bound equals the best cost, to find one as good with cheaper cuts.
MOST_TIES = 8
# Most prefixes; together they take about a second. A short search makes fewer of them.
MOST_PREFIXES = 100_000
PREFIXES_PER_SIMULATION = 500


# --- search ----------------------------------------------------------------------------------------------------------


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
