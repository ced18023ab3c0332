"""What a step took, stage by stage and action by action, beside what was predicted.

The time of a stage has four parts: its work; waiting for messages inside of actions; what lies between its actions,
where microbatches take turns and the next one runs up to its first message; and what lies before its first action and
after its last. Work is what was predicted action by action, so work is compared with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple, final

from smp_strategy.pipeline.recording import Recording, Span
from smp_strategy.pipeline.schedule import Action, Plan

__all__ = ["Comparison", "KindTimes", "StageTimes"]

KINDS = "FBIW"


class StageTimes(NamedTuple):
    """Where the seconds of a stage have gone."""

    work: float
    predicted: float
    """What the actions that it has carried out were predicted to take."""
    waiting: float
    """For messages, inside of actions."""
    between: float
    """Between its actions."""
    off_plan: float
    """After it has left its plan."""
    outside: float
    """The rest of the step, before its first action and after its last."""


class KindTimes(NamedTuple):
    """How long actions of a kind took."""

    kind: str
    number: int
    work: float
    """Median of their seconds."""
    predicted: float
    """Median of what was predicted."""
    ratio: float | None
    """Median of what each took as a multiple of its prediction; ``None`` where nothing was predicted."""


@final
@dataclass(frozen=True)
class Comparison:
    """A plan and what came of it."""

    plan: Plan
    recordings: Sequence[Recording]
    """Of all stages, by one clock, which showed nought when the first stage began to work."""

    @property
    def seconds(self) -> float:
        """The step as it was: from the first work of all to the end of the last."""
        return max((_end(recording) for recording in self.recordings), default=0.0)

    @property
    def seconds_to_end(self) -> float:
        """What it took after that until all stages had agreed and shared their results."""
        return max((recording.end for recording in self.recordings), default=0.0) - self.seconds

    @property
    def left_plan(self) -> list[int]:
        """Stages that have left the plan."""
        return [stage for stage, recording in enumerate(self.recordings) if recording.left_plan]

    def predicted(self, stage: int) -> dict[Action, tuple[float, float]]:
        """Simulated start and end of the actions of ``stage``."""
        return dict(zip(self.plan.stages[stage], self.plan.times[stage], strict=True))

    def missing(self, stage: int) -> list[Action]:
        """Actions of the plan that ``stage`` has not come to before it left it."""
        return list(self.plan.stages[stage][len(self.recordings[stage].spans) :])

    def stage(self, stage: int) -> StageTimes:
        """Where the seconds of ``stage`` have gone."""
        recording = self.recordings[stage]
        work = sum(span.work for span in recording.spans)
        waiting = sum(span.waited for span in recording.spans)
        between = sum(after.start - before.end for before, after in pairwise(recording.spans))
        off_plan = _end(recording) - _last(recording)
        planned = sum(end - start for start, end in self.plan.times[stage][: len(recording.spans)])
        rest = self.seconds - work - waiting - between - off_plan
        return StageTimes(work, planned, waiting, between, off_plan, max(rest, 0.0))

    def kinds(self) -> list[KindTimes]:
        """How long the actions of each kind took."""
        return [self._kind(kind, spans) for kind in KINDS if (spans := self._spans_of(kind))]

    def _spans_of(self, kind: str) -> list[tuple[Span, float]]:
        """Actions of a kind, and how long each was predicted to take."""
        found = []
        for stage, recording in enumerate(self.recordings):
            predicted = self.predicted(stage)
            for span in recording.spans:
                if span.action.kind == kind:
                    start, end = predicted[span.action]
                    found.append((span, end - start))
        return found

    def _kind(self, kind: str, spans: Sequence[tuple[Span, float]]) -> KindTimes:
        ratios = [span.work / predicted for span, predicted in spans if predicted > 0]
        return KindTimes(
            kind=kind,
            number=len(spans),
            work=median(span.work for span, _ in spans),
            predicted=median(predicted for _, predicted in spans),
            ratio=median(ratios) if ratios else None,
        )


def _last(recording: Recording) -> float:
    return recording.spans[-1].end if recording.spans else 0.0


def _end(recording: Recording) -> float:
    """When a stage was through with its work for the step."""
    return recording.end if recording.left_plan else _last(recording)
