"""How good an order of passes is, and whether it may be: what searches for better orders go by.

What counts is the end of a number of steps in a row, on cores that stages may share. Where it is more than one, the
first of them must not end later than it is allowed to.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, final

from smp_strategy.pipeline.schedule import Plan, Times, crowded, end_of
from smp_strategy.planning.schedule.flow import Flow
from smp_strategy.planning.schedule.peak_memory import peak_saved_bytes
from smp_strategy.planning.schedule.step_graph import Orders, StepGraph

__all__ = ["TOLERANCE", "PlanScorer", "Limits", "Timed", "excess"]

# Times that differ by less are the same but for rounding.
TOLERANCE = 1e-9


class Limits(NamedTuple):
    """What a stage may keep for backward."""

    most_bytes: Sequence[int | None]
    """Of activations on each stage."""
    active_microbatches: int | None
    """Most microbatches in flight on a stage."""
    horizon: int
    """How far ahead of its use something comes back from host memory."""

    def hold(self, plan: Plan, flow: Flow) -> bool:
        """Whether ``plan`` keeps no more."""
        active = self.active_microbatches
        if active is not None and any(plan.peak_microbatches(stage) > active for stage in range(len(plan.stages))):
            return False
        return all(limit is None for limit in self.most_bytes) or not excess(plan, flow, self)


def excess(plan: Plan, flow: Flow, limits: Limits) -> int:
    """By how many bytes ``plan`` exceeds the limit of the stage where it does so most."""
    peaks = peak_saved_bytes(plan, flow, limits.horizon)
    pairs = zip(peaks, limits.most_bytes, strict=True)
    return max([max(0, peak - limit) for peak, limit in pairs if limit is not None], default=0)


class Timed(NamedTuple):
    """A plan, and what comes of it if it is repeated."""

    plan: Plan
    row: Times
    """On cores of their own."""
    end: float
    """Of the row, on shared cores, and later where the plan alone ends later than it is allowed to."""
    is_late: bool
    """Whether that is so."""


@final
class PlanScorer:
    """See the module docstring.

    Args:
        graph: the passes of a step.
        flow: what it was made of.
        limits: what a plan must keep to.
        crowding: how much longer work takes while all stages do some.
        steps: how many steps in a row are timed.
        latest: when a step that is alone must end.

    Attributes:
        graph: as given.
        steps: as given.
    """

    def __init__(
        self,
        graph: StepGraph,
        flow: Flow,
        limits: Limits,
        *,
        crowding: float = 1.0,
        steps: int = 1,
        latest: float = math.inf,
    ) -> None:
        self.graph = graph
        self.steps = steps
        self._flow = flow
        self._limits = limits
        self._crowding = crowding
        self._latest = latest * (1 + TOLERANCE)

    def bound(self, *, splits: bool) -> float:
        """No order ends earlier."""
        graph = self.graph
        # `crowded` lets time pass at least so much more slowly than work is done.
        work = graph.num_microbatches * graph.work_of_microbatch
        shared = self.steps * work * self._crowding / graph.num_stages
        return max(shared, graph.least_makespan(splits=splits, steps=self.steps)) * (1 + TOLERANCE)

    def timed(self, orders: Orders) -> Timed:
        """What comes of ``orders``; where they would wait for ever, of orders that are repaired."""
        plan, row = self.graph.follow_in_a_row(orders, self.steps)
        late = end_of(crowded(plan.times, self._crowding)) - self._latest if self._latest < math.inf else 0.0
        return Timed(plan, row, end_of(crowded(row, self._crowding)) + self.steps * max(0.0, late), late > 0)

    def allows(self, plan: Plan) -> bool:
        """Whether ``plan`` keeps to the limits."""
        return self._limits.hold(plan, self._flow)

    def better(self, one: Timed, other: Timed) -> Timed:
        """``one``, if it may be and is better than ``other``."""
        is_better = one.end < other.end * (1 - TOLERANCE) and not one.is_late
        return one if is_better and self.allows(one.plan) else other
