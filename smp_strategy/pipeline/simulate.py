"""Schedules, computed: a list-scheduling simulation over the segment graph gives every stage its order of actions.

Whenever a stage is free it takes the best of its actions whose inputs are there. The policy says which is best:

* ``simple``: a forward if there is one, so all forwards come before the backwards (GPipe);
* ``interleaved``: a backward if there is one, and no new microbatch while ``active_microbatches`` are in flight on
  the stage (SageMaker's schedule; on a chain of stages it is 1F1B with a longer warm-up).

The forwards of a segment run in the order of the microbatches, and so do its backwards: gradients are added up in
the order of one process that accumulates over the same microbatches, which makes the sums bit-identical.

The simulated order is a linear order of the dependency graph, so stages that follow it cannot deadlock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from smp_strategy.pipeline.routing import Flow, SegmentId
from smp_strategy.pipeline.schedule import Action, Plan

__all__ = ["simulate"]

# Backward computes the gradients of inputs and of weights: twice the work of forward.
BACKWARD_COST = 2.0
# A segment without compute (it only forwards or reads a value) still takes its turn.
SMALLEST_COST = 1e-9

Task = tuple[SegmentId, Action]


@dataclass
class _State:
    """What the simulation knows at the current time."""

    flow: Flow
    done: dict[Task, float] = field(default_factory=dict)
    """End time of each finished or running action."""
    pending: dict[int, list[Task]] = field(default_factory=dict)
    """Actions still to do, by stage, in program order."""
    free_at: list[float] = field(default_factory=list)

    def ready_time(self, task: Task) -> float | None:
        """When the inputs of ``task`` are there; ``None`` while one of them is not even scheduled."""
        segment, action = task
        needs = [(other, Action(action.kind, action.microbatch, other.number)) for other in self._needs(task)]
        if action.microbatch:
            needs.append((segment, Action(action.kind, action.microbatch - 1, action.segment)))
        if action.kind == "B":
            last = self.flow.num_segments(segment.stage) - 1
            needs.append((SegmentId(segment.stage, last), Action("F", action.microbatch, last)))
        if any(need not in self.done for need in needs):
            return None
        return max((self.done[need] for need in needs), default=0.0)

    def _needs(self, task: Task) -> frozenset[SegmentId]:
        segment, action = task
        return self.flow.forward_needs[segment] if action.kind == "F" else self.flow.backward_needs[segment]

    def in_flight(self, stage: int) -> int:
        """Microbatches that ``stage`` has begun and not finished."""
        begun = {action.microbatch for segment, action in self.done if segment.stage == stage}
        unfinished = {action.microbatch for _, action in self.pending[stage]}
        return len(begun & unfinished)


def simulate(
    flow: Flow,
    num_microbatches: int,
    *,
    policy: Literal["interleaved", "simple"] = "interleaved",
    active_microbatches: int | None = None,
) -> Plan:
    """Order the work of a step.

    Args:
        flow: segments of one microbatch and their dependencies.
        num_microbatches: microbatches of the step.
        policy: see the module docstring.
        active_microbatches: most microbatches in flight on a stage under ``interleaved``; default: stages + 2.

    Returns:
        The plan of every stage. Two stages, four microbatches, two in flight::

            stage 0   F0 F1 B0 F2 B1 F3 B2 B3
            stage 1   F0 B0 F1 B1 F2 B2 F3 B3
    """
    cap = num_microbatches if policy == "simple" else active_microbatches or flow.num_stages + 2
    state = _State(flow)
    state.pending = {stage: _tasks_of(flow, stage, num_microbatches) for stage in range(flow.num_stages)}
    state.free_at = [0.0] * flow.num_stages
    order: list[list[Task]] = [[] for _ in range(flow.num_stages)]
    while any(state.pending.values()):
        start, _, stage, task = min(
            choice for stage in range(flow.num_stages) if (choice := _choose(state, stage, policy, cap)) is not None
        )
        state.done[task] = start + _cost(flow.forward_cost, task)
        state.free_at[stage] = state.done[task]
        state.pending[stage].remove(task)
        order[stage].append(task)
    return Plan(
        tuple(tuple(action for _, action in tasks) for tasks in order),
        tuple(
            tuple((state.done[task] - _cost(flow.forward_cost, task), state.done[task]) for task in tasks)
            for tasks in order
        ),
    )


def _tasks_of(flow: Flow, stage: int, num_microbatches: int) -> list[Task]:
    mine = [segment for segment in flow.forward_cost if segment.stage == stage]
    tasks = []
    for microbatch in range(num_microbatches):
        tasks += [(segment, Action("F", microbatch, segment.number)) for segment in mine]
        tasks += [
            (segment, Action("B", microbatch, segment.number))
            for segment in reversed(mine)
            if segment in flow.backward_needs
        ]
    return tasks


def _choose(state: _State, stage: int, policy: str, cap: int) -> tuple[float, tuple[int, int, int], int, Task] | None:
    """The next action of ``stage`` and when it can start; ``None`` if it has to wait for others."""
    in_flight = state.in_flight(stage)
    choices = []
    for task in state.pending[stage]:
        segment, action = task
        begins = action.kind == "F" and not any(
            (other, Action("F", action.microbatch, other.number)) in state.done
            for other in state.flow.forward_cost
            if other.stage == stage
        )
        if begins and in_flight >= cap:
            continue
        ready = state.ready_time(task)
        if ready is None:
            continue
        first = "F" if policy == "simple" else "B"
        rank = (action.kind != first, action.microbatch, -segment.number if action.kind == "B" else segment.number)
        choices.append((max(ready, state.free_at[stage]), rank, stage, task))
    return min(choices) if choices else None


def _cost(forward_cost: Mapping[SegmentId, float], task: Task) -> float:
    segment, action = task
    cost = max(forward_cost[segment], SMALLEST_COST)
    return cost * BACKWARD_COST if action.kind == "B" else cost
