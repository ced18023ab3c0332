"""Objective and constraints of the schedule search: simulated time of an order of passes, and its memory limits.

The score is the end of a number of steps in a row. If there are several, the first of them has a deadline.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, final

from smp_strategy.pipeline.action_order import peak_microbatches
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.schedule.flow import Flow
from smp_strategy.planning.schedule.peak_memory import peak_saved_bytes
from smp_strategy.planning.schedule.step_graph import Orders, SimulatedRow, StepGraph

__all__ = ["TOLERANCE", "PlanScorer", "Limits", "Timed", "excess"]

# Times that differ by less are the same but for rounding.
TOLERANCE = 1e-9


class Limits(NamedTuple):
    """Limits of what stages keep for backward."""

    most_bytes: Sequence[int | None]
    """Bytes of activations on each stage; ``None``: unlimited."""
    active_microbatches: int | None
    """Most microbatches in flight on a stage."""
    horizon: int
    """Actions by which copies from host memory come ahead of their use."""

    @property
    def are_none(self) -> bool:
        """Whether every plan keeps to the limits."""
        return self.active_microbatches is None and all(limit is None for limit in self.most_bytes)

    def hold(self, plan: Plan, flow: Flow) -> bool:
        active = self.active_microbatches
        if active is not None and any(peak_microbatches(actions) > active for actions in plan.stages):
            return False
        return all(limit is None for limit in self.most_bytes) or not excess(plan, flow, self)


def excess(plan: Plan, flow: Flow, limits: Limits) -> int:
    """Bytes by which ``plan`` exceeds the limit of the worst stage; 0 if it fits."""
    peaks = peak_saved_bytes(plan, flow, limits.horizon)
    pairs = zip(peaks, limits.most_bytes, strict=True)
    return max([max(0, peak - limit) for peak, limit in pairs if limit is not None], default=0)


class Timed(NamedTuple):
    """Steps in a row with their score."""

    row: SimulatedRow
    end: float
    """End of the row, plus a penalty for every step if a single one misses the deadline."""
    is_late: bool
    """Whether a single step misses the deadline."""


@final
class PlanScorer:
    """Score of orders of passes: end of ``steps`` steps in a row, under memory limits and a deadline.

    Attributes:
        graph: As given.
        steps: As given.
    """

    def __init__(
        self,
        graph: StepGraph,
        flow: Flow,
        limits: Limits,
        *,
        steps: int = 1,
        latest: float = math.inf,
    ) -> None:
        self.graph = graph
        self.steps = steps
        self._flow = flow
        self._limits = limits
        self._latest = latest * (1 + TOLERANCE)

    def bound(self, *, splits: bool) -> float:
        """Lower bound on the end of any order."""
        return self.graph.least_makespan(splits=splits, steps=self.steps) * (1 + TOLERANCE)

    def timed(self, orders: Orders) -> Timed:
        """Simulation of ``orders``; orders that would deadlock are repaired first."""
        row = self.graph.follow_in_a_row(orders, self.steps)
        late = row.makespan - self._latest if self._latest < math.inf else 0.0
        return Timed(row, row.end + self.steps * max(0.0, late), late > 0)

    def allows(self, timed: Timed) -> bool:
        """Whether each step keeps to the limits."""
        return self._limits.are_none or self._limits.hold(self.graph.plan_of(timed.row), self._flow)

    def better(self, one: Timed, other: Timed) -> Timed:
        """``one`` if it is allowed and better than ``other``, else ``other``."""
        is_better = one.end < other.end * (1 - TOLERANCE) and not one.is_late
        return one if is_better and self.allows(one) else other
