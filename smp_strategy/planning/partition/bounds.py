"""Lower bounds on step time and memory of a stage, for any schedule; they prune the partition search.

F, B and W are the forward work of a stage, the backward work that other stages wait for, and the weight gradients that
only the optimizer waits for (per microbatch; W is part of B unless the schedule splits them, and B part of W on the
stage where backward ends). With m microbatches a stage

* works m (F + B + W);
* waits at the beginning: for its first input (``head``), and before its first backward for the loss of the first
  microbatch and the gradient's way from there (``back``). At most ``most`` forwards fill that time;
* waits at the end: its last forward is followed by the way to the loss and back. At most ``most`` backwards fill that
  time. Both waits add up if the last forward comes after the first backward, that is for m > ``most``;
* adds the work that follows its last backward on other stages (``tail``), unless weight gradients could fill that time;
* holds its parameters, gradients and optimizer state, the bytes that every stage holds, and activations of ``least``
  microbatches.

Ways through the program are longest paths of the trace, so the bounds hold for programs that branch.
"""

from collections.abc import Callable
from typing import NamedTuple, final

from smp_strategy.planning.partition.problem import HeldBytes, PartitionProblem, Promise, Window

__all__ = ["Bounds", "StageUnits"]

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
        """Units of both on one stage."""
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
    """Lower bounds on time and memory of the stages of a problem.

    Args:
        problem: Partitioning problem.
        promise: Bounds on the microbatches in flight on each stage.
    """

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
