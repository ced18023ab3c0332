"""Comparison of a measured step with its simulated schedule, by stage and by kind of action.

The time of a stage has four parts: its work; waiting for messages inside of actions; the gaps between its actions, in
which microbatches take turns and the next one runs up to its first message; and the time before its first action and
after its last. Predictions are times of work, so only work is compared with them.
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
    """Breakdown of a stage's time, in seconds."""

    work: float
    predicted: float
    """Predicted work of the actions that ran."""
    waiting: float
    """Waiting for messages, inside of actions."""
    between: float
    """Gaps between actions."""
    off_plan: float
    """Time after the stage left its plan."""
    outside: float
    """Rest of the step, before the first action and after the last."""


class KindTimes(NamedTuple):
    """Measured and predicted times of the actions of a kind."""

    kind: str
    number: int
    work: float
    """Median of measured seconds."""
    predicted: float
    """Median of predicted seconds."""
    ratio: float | None
    """Median of measured over predicted; ``None`` without predictions."""


@final
@dataclass(frozen=True)
class Comparison:
    """Plan of a step beside its recordings."""

    plan: Plan
    recordings: Sequence[Recording]
    """Recordings of all stages on one clock, with 0 when the first stage began to work."""

    @property
    def seconds(self) -> float:
        """Measured time of the step, from the first work to the end of the last, over all stages."""
        return max((_end(recording) for recording in self.recordings), default=0.0)

    @property
    def seconds_to_end(self) -> float:
        """Time from then until all stages had agreed and shared their results."""
        return max((recording.end for recording in self.recordings), default=0.0) - self.seconds

    @property
    def left_plan(self) -> list[int]:
        """Stages that left the plan."""
        return [stage for stage, recording in enumerate(self.recordings) if recording.left_plan]

    def predicted(self, stage: int) -> dict[Action, tuple[float, float]]:
        """Simulated start and end of the actions of ``stage``."""
        return dict(zip(self.plan.stages[stage], self.plan.times[stage], strict=True))

    def missing(self, stage: int) -> list[Action]:
        """Actions of the plan that ``stage`` did not reach before it left the plan."""
        return list(self.plan.stages[stage][len(self.recordings[stage].spans) :])

    def stage(self, stage: int) -> StageTimes:
        recording = self.recordings[stage]
        work = sum(span.work for span in recording.spans)
        waiting = sum(span.waited for span in recording.spans)
        between = sum(after.start - before.end for before, after in pairwise(recording.spans))
        off_plan = _end(recording) - _last(recording)
        planned = sum(end - start for start, end in self.plan.times[stage][: len(recording.spans)])
        rest = self.seconds - work - waiting - between - off_plan
        return StageTimes(work, planned, waiting, between, off_plan, max(rest, 0.0))

    def kinds(self) -> list[KindTimes]:
        return [self._kind(kind, spans) for kind in KINDS if (spans := self._spans_of(kind))]

    def _spans_of(self, kind: str) -> list[tuple[Span, float]]:
        """Actions of a kind with their predicted seconds."""
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
    """End of a stage's work in the step."""
    return recording.end if recording.left_plan else _last(recording)
