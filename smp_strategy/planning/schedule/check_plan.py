"""Verification of a plan: every pass runs once, in an order that the runtime can follow, and without deadlock.

The plan is executed symbolically: each stage runs its actions in order and blocks until the inputs of an action have
been produced on other stages. If all unfinished stages are blocked, the plan deadlocks.
"""

from collections import Counter
from typing import final

from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.planning.schedule.flow import Flow

__all__ = ["PlanError", "check"]


@final
class PlanError(AssertionError):
    """A plan that cannot be carried out: a mistake of ours, not of the user."""


def check(plan: Plan, flow: Flow, num_microbatches: int) -> None:
    """Verify that ``plan`` runs all passes of ``flow`` and terminates.

    Raises:
        PlanError: a pass is missing, superfluous or out of order, or stages would wait for ever.
    """
    for stage, actions in enumerate(plan.stages):
        segments = [segment for segment in flow.work if segment.stage == stage]
        _check_complete(stage, actions, segments, flow, num_microbatches)
        _check_order(stage, actions, max((segment.number for segment in segments), default=0))
    _execute(plan, flow)


def _check_complete(
    stage: int, actions: tuple[Action, ...], segments: list[SegmentId], flow: Flow, num_microbatches: int
) -> None:
    """Every forward once, and every backward once, whole or in its two parts."""
    done: Counter[tuple[str, int, int]] = Counter()
    for action in actions:
        for part in "IW" if action.kind == "B" else action.kind:
            done[part, action.microbatch, action.segment] += 1
    wanted = Counter(
        (part, microbatch, segment.number)
        for segment in segments
        for microbatch in range(num_microbatches)
        for part in ("FIW" if segment in flow.backward_needs else "F")
    )
    for text, difference in (("lacks", wanted - done), ("does once too often", done - wanted)):
        if difference:
            kind, microbatch, segment = min(difference)
            raise PlanError(f"The plan of stage {stage} {text}: {Action(kind, microbatch, segment)}.")  # type: ignore[arg-type]


def _check_order(stage: int, actions: tuple[Action, ...], last_segment: int) -> None:
    """Order constraints of :mod:`smp_strategy.pipeline.microbatch_runner`."""
    next_microbatch: Counter[tuple[str, int]] = Counter()
    forward: Counter[int] = Counter()
    backward: dict[int, int] = {}
    differentiated: set[tuple[int, int]] = set()

    def demand(holds: bool, reason: str) -> None:
        if not holds:
            raise PlanError(f"The plan of stage {stage} has {action} too early: {reason}.")

    for action in actions:
        microbatch, segment = action.microbatch, action.segment
        for part in "IW" if action.kind == "B" else action.kind:
            in_turn = next_microbatch[part, segment] == microbatch
            demand(in_turn, f"it is the turn of microbatch {next_microbatch[part, segment]}")
            next_microbatch[part, segment] += 1
        if action.kind == "F":
            demand(forward[microbatch] == segment, "an earlier segment is still to come")
            forward[microbatch] += 1
        elif action.kind == "W":
            demand((microbatch, segment) in differentiated, "the gradients of its inputs are not known")
        else:
            demand(forward[microbatch] == last_segment + 1, "the forward is not complete")
            demand(backward.get(microbatch, segment + 1) > segment, "segments go backward from the last one down")
            backward[microbatch] = segment
            differentiated.add((microbatch, segment))


def _execute(plan: Plan, flow: Flow) -> None:
    done: set[tuple[bool, SegmentId, int]] = set()
    reached = [0] * len(plan.stages)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(plan.stages):
            while reached[stage] < len(actions):
                action = actions[reached[stage]]
                segment, is_forward = SegmentId(stage, action.segment), action.kind == "F"
                needs = flow.forward_needs if is_forward else {} if action.kind == "W" else flow.backward_needs
                if any((is_forward, need, action.microbatch) not in done for need in needs.get(segment, ())):
                    break
                if action.kind != "W":
                    done.add((is_forward, segment, action.microbatch))
                reached[stage] += 1
                moved = True
    stuck = [
        f"stage {stage} at {actions[reached[stage]]}"
        for stage, actions in enumerate(plan.stages)
        if reached[stage] < len(actions)
    ]
    if stuck:
        raise PlanError(f"The plan would wait for ever: {', '.join(stuck)}.")
