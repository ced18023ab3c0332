"""Steady-state step time of a schedule: the period of steps that follow each other, as they do in training.

Nothing synchronizes stages between two steps: a stage that has finished its part of a step and of the optimizer begins
the next step, while others still compute weight gradients. With the right order of work the bubbles at the beginning
and at the end of a step therefore cost nothing. Under the published order of ZB-H2 no stage waits at all
(arXiv:2401.10241, section 4, which removes the optimizer's synchronization for that).

If something does synchronize stages (gradients are clipped by their norm, a weight is tied across stages), each step
takes as long as a single one.
"""

from dataclasses import replace

from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.schedule.step_graph import StepGraph

__all__ = ["STEPS", "with_period"]

# Simulated steps in a row: the more, the less weight beginning and end have.
STEPS = 3


def with_period(plan: Plan, graph: StepGraph) -> Plan:
    """``plan`` with its simulated time per step in steady state.

    Args:
        plan: Schedule of a single step. If it has a period already, that is of the same graph.
        graph: Passes of that step.
    """
    if plan.period is not None:
        return plan
    row = graph.follow_in_a_row(graph.orders_of(plan), STEPS)
    return replace(plan, period=(row.end - row.makespan) / (STEPS - 1))
