"""Pipeline schedule: the plan of each stage as an ordered list of actions, with a text form.

An action is the forward (``F``) or backward (``B``) pass of one segment of one microbatch: ``F3`` is the forward of
microbatch 3, ``B0.1`` the backward of its second segment on this stage. A backward may be split into the part that
computes the gradients of the segment's inputs (``I``), for which other stages wait, and that of the weights (``W``).
Profiler ranges and traces carry the same text.
"""

import re
from dataclasses import dataclass
from typing import Literal, Self, final

__all__ = [
    "Action",
    "Plan",
    "Times",
    "end_of",
]

_ACTION = re.compile(r"(?P<kind>[FBIW])(?P<microbatch>\d+)(?:\.(?P<segment>\d+))?")


@final
@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One forward or backward pass of one segment of one microbatch on a stage."""

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
    """End of the last action of all stages."""
    return max((span[1] for stage in times for span in stage), default=0.0)


@final
@dataclass(frozen=True)
class Plan:
    """Actions of each stage in order, with simulated times."""

    stages: tuple[tuple[Action, ...], ...]
    times: Times
    """Simulated start and end of each action, in the unit of the costs."""
    period: float | None = None
    """Simulated time from the end of a step to that of the next one, if nothing makes stages wait in between; ``None``:
    not known."""

    @property
    def makespan(self) -> float:
        """Simulated time from the first action to the end of the last."""
        return end_of(self.times)

    @property
    def bubble(self) -> float:
        """Bubble: share of the stages' time in which they wait, 0 to 1."""
        busy = sum(end - start for stage in self.times for start, end in stage)
        total = self.makespan * len(self.stages)
        return 1.0 - busy / total if total else 0.0

    @property
    def overlap(self) -> float:
        """Share of a step that is saved by overlap with the next one, 0 to 1; 0 if that is not known."""
        return 0.0 if self.period is None or not self.makespan else 1 - self.period / self.makespan
