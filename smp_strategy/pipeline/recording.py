"""Recording of a step: the measured counterpart of a plan, as plain data."""

from dataclasses import dataclass, replace
from typing import NamedTuple, final

from smp_strategy.activations.policy import OffloadStats
from smp_strategy.pipeline.schedule import Action, Plan

__all__ = ["Recorded", "Recording", "Span"]


class Span(NamedTuple):
    """Measured times of an action, in seconds of a monotonic clock with any zero."""

    action: Action
    start: float
    end: float
    waited: float
    """Seconds of the span in which the stage waited for messages; the rest is work."""

    @property
    def work(self) -> float:
        """Seconds of the span in which the stage worked."""
        return self.end - self.start - self.waited


@final
@dataclass(frozen=True)
class Recording:
    """Measured times of one step of a stage."""

    spans: tuple[Span, ...]
    """Actions of the plan in order; only the first of them if the stage has left the plan."""
    end: float
    """End of the step, including the work that is no action of the plan: the rest of microbatches that took another
    path, the agreement of the stages, the exchange of results."""
    left_plan: bool = False
    """Whether a microbatch took another path than the plan was made for."""
    traffic: OffloadStats = OffloadStats()

    @property
    def seconds(self) -> float:
        """Time from the first action to the end of the step."""
        return self.end - self.spans[0].start if self.spans else 0.0

    @property
    def waited(self) -> float:
        """Part of it in which the stage waited for messages."""
        return sum(span.waited for span in self.spans)

    @property
    def idle(self) -> float:
        """Part of it in which the stage waited for others: for messages, and after its last action for their end."""
        return self.waited + (0.0 if self.left_plan or not self.spans else self.end - self.spans[-1].end)

    def since(self, zero: float) -> "Recording":
        """The same recording with times relative to ``zero``."""
        spans = tuple(span._replace(start=span.start - zero, end=span.end - zero) for span in self.spans)
        return replace(self, spans=spans, end=self.end - zero)


class Recorded(NamedTuple):
    """Plan and recording of a training step on this stage."""

    number: int
    plan: Plan
    recording: Recording
    """Recording by the clock of this rank."""
