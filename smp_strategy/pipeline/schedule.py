"""The plan of a stage: an ordered list of actions, with a text form.

An action is the forward (``F``) or backward (``B``) pass of one segment of one microbatch: ``F3`` is the forward of
microbatch 3, ``B0.1`` the backward of its second segment on this stage. A backward may be split into the part that
computes the gradients of the segment's inputs (``I``), for which other stages wait, and that of the weights (``W``).
Profiler ranges and traces carry the same text.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Self, final

__all__ = [
    "Action",
    "Plan",
    "Times",
    "backward_positions",
    "begun_early",
    "end_of",
    "is_in_order",
    "tail_of",
]

_ACTION = re.compile(r"(?P<kind>[FBIW])(?P<microbatch>\d+)(?:\.(?P<segment>\d+))?")


@final
@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One pass of one segment of one microbatch on a stage."""

    kind: Literal["F", "B", "I", "W"]
    microbatch: int
    segment: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.segment}" if self.segment else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form; the inverse of ``str``."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"An action looks like `F3` or `B0.1`, but this is {text!r}.")
        return cls(match["kind"], int(match["microbatch"]), int(match["segment"] or 0))  # type: ignore[arg-type]


Times = tuple[tuple[tuple[float, float], ...], ...]
"""Start and end of each action of each stage."""


def end_of(times: Times) -> float:
    """When the last action of all ends."""
    return max((span[1] for stage in times for span in stage), default=0.0)


@final
@dataclass(frozen=True)
class Plan:
    """What each stage does, in order, with simulated times."""

    stages: tuple[tuple[Action, ...], ...]
    """Actions of each stage."""
    times: Times
    """Simulated start and end of each action, in the unit of the costs."""
    period: float | None = None
    """Simulated time from the end of a step to that of the next one, where nothing makes stages wait in between;
    ``None``: not known."""

    @property
    def makespan(self) -> float:
        """Simulated time from the first action to the end of the last."""
        return end_of(self.times)

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they wait, 0 to 1."""
        busy = sum(end - start for stage in self.times for start, end in stage)
        total = self.makespan * len(self.stages)
        return 1.0 - busy / total if total else 0.0

    @property
    def overlap(self) -> float:
        """Share of a step that is saved where another one follows it, 0 to 1; 0 where that is not known."""
        return 0.0 if self.period is None or not self.makespan else 1 - self.period / self.makespan

    def peak_microbatches(self, stage: int) -> int:
        """Most microbatches whose activations ``stage`` holds at once."""
        alive, peak = set(), 0
        last = {action.microbatch: action for action in self.stages[stage]}
        for action in self.stages[stage]:
            alive.add(action.microbatch)
            peak = max(peak, len(alive))
            if action is last[action.microbatch]:
                alive.discard(action.microbatch)
        return peak


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
