"""Properties of the order of a stage's actions, which the runtime asks before a step."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from smp_strategy.pipeline.schedule import Action, Plan

__all__ = ["backward_positions", "begun_early", "is_in_order", "tail_of"]


def backward_positions(actions: Sequence[Action]) -> dict[tuple[int, int], int]:
    """By microbatch and segment: the position of the action that backward reaches this segment with."""
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
    """The position after which nobody waits for what is left: gradients of weights."""
    return max((position for position, action in enumerate(actions) if action.kind != "W"), default=0)


def is_in_order(plan: Plan) -> bool:
    """Whether every stage is through with a microbatch before it begins the next."""
    return all(before.microbatch <= after.microbatch for actions in plan.stages for before, after in pairwise(actions))


def begun_early(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    """After each action: the microbatches that may begin now, up to their first receive, though others are to compute.

    The next one to run forward begins while there are backwards before it. It does not while a microbatch is before it
    that ends its forward there: that one would see what the next has counted in objects that both share. One that has
    several segments comes back later, when others have begun anyway.
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
