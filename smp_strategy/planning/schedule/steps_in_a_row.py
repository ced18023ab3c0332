"""What a timetable takes where steps follow each other, as they do in training.

Nothing makes stages wait for each other between two steps: one that has ended its part of a step, and its part of the
optimizer's, begins the next one, while others still compute gradients of weights. So the waits at the beginning and at
the end of a step cost nothing, if the order of work is right. With the published order of ZB-H2 no stage waits at all
(arXiv:2401.10241, section 4, which removes the optimizer's synchronization for that).

Where something does make stages wait for each other (gradients are clipped by their norm, a weight is tied across
stages), steps take as long as one that is alone.
"""

from dataclasses import replace

from smp_strategy.pipeline.schedule import Plan, end_of
from smp_strategy.planning.schedule.step_graph import StepGraph

__all__ = ["STEPS", "with_period"]

# Steps that are timed in a row: the more there are, the less do beginning and end weigh.
STEPS = 3


def with_period(plan: Plan, graph: StepGraph) -> Plan:
    """``plan`` with its simulated time per step in steady state.

    Args:
        plan: timetable of a single step.
        graph: passes of that step.
    """
    _, row = graph.follow_in_a_row(graph.orders_of(plan), STEPS)
    return replace(plan, period=(end_of(row) - plan.makespan) / (STEPS - 1))
