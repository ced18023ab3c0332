"""Order of a stage's actions: the order without a plan, and properties that a step needs to know beforehand."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from smp_strategy.pipeline.schedule import Action, Plan

__all__ = [
    "ALL_SEGMENTS",
    "backward_positions",
    "begun_early",
    "is_alternating",
    "is_in_order",
    "peak_microbatches",
    "program_order",
    "tail_of",
]

ALL_SEGMENTS = 1 << 30
"""Number of a segment after all others."""


def program_order(num_microbatches: int, *, has_backward: bool) -> list[Action]:
    """Actions of a run without a plan: forward and backward of each microbatch in turn, all segments at once."""
    order = []
    for number in range(num_microbatches):
        order.append(Action("F", number, ALL_SEGMENTS))
        if has_backward:
            order.append(Action("B", number, 0))
    return order


def is_alternating(actions: Sequence[Action]) -> bool:
    """Whether each forward is followed by a backward at once."""
    return bool(actions) and [action.kind == "F" for action in actions] == [True, False] * (len(actions) // 2)


def backward_positions(actions: Sequence[Action]) -> dict[tuple[int, int], int]:
    """Position of the action whose backward reaches a segment, by microbatch and segment."""
    found: dict[tuple[int, int], int] = {}
    waiting: dict[int, list[int]] = defaultdict(list)
    for position, action in enumerate(actions):
        segments = waiting[action.microbatch]
        if action.kind == "F":
            segments.append(action.segment)
        else:
            while segments and segments[-1] >= action.segment:
                found[action.microbatch, segments.pop()] = position
    return found


def tail_of(actions: Sequence[Action]) -> int:
    """Position of the last action that other stages may wait for; only weight gradients follow it."""
    return max((position for position, action in enumerate(actions) if action.kind != "W"), default=0)


def is_in_order(plan: Plan) -> bool:
    """Whether every stage completes a microbatch before it begins the next."""
    return all(before.microbatch <= after.microbatch for actions in plan.stages for before, after in pairwise(actions))


def begun_early(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    """Microbatches that may begin early after each action, up to their first receive.

    The next microbatch to run forward begins while backwards precede it. It does not begin before another microbatch
    ends its forward: that one would see the counts of the next in objects that both share. A microbatch with several
    segments returns later, when others have begun anyway.
    """
    found: list[tuple[int, ...]] = [()] * len(actions)
    following: int | None = None
    comes_back: set[int] = set()
    for position in range(len(actions) - 1, 0, -1):
        action = actions[position]
        if action.kind != "F":
            found[position - 1] = () if following is None else (following,)
            continue
        if following is not None and action.microbatch in comes_back:
            found[position - 1] = (action.microbatch, following)
        comes_back.add(action.microbatch)
        following = action.microbatch
    return found


def peak_microbatches(actions: Sequence[Action]) -> int:
    """Peak number of microbatches whose activations a stage holds at once."""
    alive, peak = set(), 0
    last = {action.microbatch: action for action in actions}
    for action in actions:
        alive.add(action.microbatch)
        peak = max(peak, len(alive))
        if action is last[action.microbatch]:
            alive.discard(action.microbatch)
    return peak
