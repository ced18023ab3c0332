"""All-reduce of gradient shards over the replicas of a shard group, overlapped with backward.

When a unit has been reduced for the last time before the optimizer's step, its shard is summed over the replicas. There
is one group of replicas for each rank of the shard group. The ranks of such a group must start the same sums in the
same order, but they are in different shard groups, and those may reduce in different orders, or not the same units.

So each group has an **order** of its own, of all trained units. A unit's sum begins when the unit and all before it in
the order have probably been reduced for the last time, and for the rest when the pass ends, with zeros where there are
no gradients. All ranks start every sum once per step, whatever happens, so their collectives match. And no rank waits
for a sum before its pass has ended, so no shard group waits for another one during a pass.

*Probably*, because only the end of the pass tells. A unit counts as complete once it has been reduced as often during
this last backward as during that of the step before, and at least once. From the moment its sum begins, the unit has no
gradients, so later ones are kept apart. At the end all ranks tell each other which units have later ones; these are
summed in the same way and added. They also tell when each unit was reduced, which determines the order for the next
step: the earliest first, units that were not reduced during the last backward at the end.

Either all ranks get all of a sum, or each one the part that it alone updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from smp_strategy.data_parallel.flat_unit import FlatUnit
from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.distributed.handle import Handle, wait_for

__all__ = ["ReplicaAllReduce"]

_NEVER = 2**31


class _Sum(NamedTuple):
    """Sum of the shards that a unit had, under way."""

    sums: list[Tensor]
    reduced: list[Handle[object]]
    added_up: list[Handle[object]]


@final
@dataclass(kw_only=True)
class _Step:
    """State between two steps of the optimizer."""

    counts: list[int]
    """Number of reductions of each unit in the last backward."""
    places: list[int]
    """Index of each unit's last reduction among all reductions."""
    sums: dict[int, _Sum] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    """Units that have been reduced after their sums had begun."""
    said: Handle[Tensor] | None = None
    """For each unit whether it is late on some rank, and the sum of the ranks' places."""


@final
class ReplicaAllReduce:
    """Sums the gradient shards of units over the replicas.

    Args:
        units: Units, in the same order on all ranks.
        replicas: Collectives of the ranks that have the same shards.
        deals_out: Whether each replica gets the sum of its own part only.
    """

    def __init__(self, units: Sequence[FlatUnit], replicas: Collectives, *, deals_out: bool = False) -> None:
        self._deals_out = deals_out
        self._units = units
        self._replicas = replicas
        self._order: list[int] = []
        self.begin_pass()
        self._usual_counts = [1] * len(units)
        self._step = self._new_step()

    def begin_pass(self) -> None:
        """Begin a pass with backward: units that are trained for the first time enter the order."""
        numbers = reversed(range(len(self._units)))
        self._order += [n for n in numbers if self._units[n].is_trained and n not in self._order]

    def reduced(self, number: int) -> None:
        """Note that a unit is being reduced, in the last backward or at the end of its pass."""
        step = self._step
        assert step.said is None, "the sums of the pass before are finished first"
        step.counts[number] += 1
        step.places[number] = sum(step.counts)
        if number in step.sums:
            step.late.add(number)
        while len(step.sums) < len(self._order):
            following = self._order[len(step.sums)]
            if step.counts[following] < self._usual_counts[following]:
                return
            self._begin(following)

    def wait_reduced(self, number: int) -> None:
        """Wait for gradients of a unit that are being reduced."""
        self._units[number].wait_reduced()
        if number in self._step.sums:
            wait_for(self._step.sums[number].reduced)

    def begin_rest(self) -> None:
        """Begin all sums that have not begun: no gradients will come."""
        step = self._step
        assert step.said is None, "the sums of the pass before are finished first"
        for number in self._order[len(step.sums) :]:
            self._begin(number)
        words = [[int(number in step.late), step.places[number]] for number in self._order]
        said = torch.tensor(words, dtype=torch.int64, device="cpu")
        step.said = self._replicas.all_reduce(said).then(lambda _: said)

    def finish(self) -> None:
        """Wait for the sums and set them as the units' gradients. Collective."""
        if self._step.said is None:
            self.begin_rest()
        step, self._step = self._step, self._new_step()
        assert step.said is not None
        words = dict(zip(self._order, step.said.wait().tolist(), strict=True))
        late = {number: self._sum_of(number) for number in self._order if words[number][0]}
        for number, now in step.sums.items():
            wait_for(now.added_up)
            if number in late:
                wait_for(late[number].added_up)
                torch._foreach_add_(now.sums, late[number].sums)
            self._units[number].put_gradients(now.sums)
        self._usual_counts = [max(count, 1) for count in step.counts]
        self._order.sort(key=lambda number: words[number][1])

    def _new_step(self) -> _Step:
        return _Step(counts=[0] * len(self._units), places=[_NEVER] * len(self._units))

    def _begin(self, number: int) -> None:
        self._step.sums[number] = self._sum_of(number)

    def _sum_of(self, number: int) -> _Sum:
        shards, reduced = self._units[number].take_gradients()
        # A unit's shards are sent together, so each waits for all reductions.
        if not self._deals_out:
            return _Sum(shards, reduced, [self._replicas.all_reduce(shard, reduced) for shard in shards])
        sums = [shard.new_empty(shard.numel() // self._replicas.size) for shard in shards]
        pairs = zip(shards, sums, strict=True)
        return _Sum(sums, reduced, [self._replicas.reduce(shard, own, reduced, is_first=True) for shard, own in pairs])
