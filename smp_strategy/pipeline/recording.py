"""When a stage did what: the measured counterpart of a plan, as plain data."""

from dataclasses import dataclass, replace
from typing import NamedTuple, final

from smp_strategy.activations.offload_stats import OffloadStats
from smp_strategy.pipeline.schedule import Action, Plan

__all__ = ["Recorded", "Recording", "Span"]


class Span(NamedTuple):
    """An action as it was carried out, in seconds of a clock that runs steadily from wherever."""

    action: Action
    start: float
    end: float
    waited: float
    """Seconds of it in which the stage waited for messages; the others are work."""

    @property
    def work(self) -> float:
        """Seconds in which the stage did something."""
        return self.end - self.start - self.waited


@final
@dataclass(frozen=True)
class Recording:
    """The latest step of a stage."""

    spans: tuple[Span, ...]
    """In the order in which they were done; those of the plan, or the first of them where the stage has left it."""
    end: float
    """When everything was done, what no action of the plan stands for as well: what is left of microbatches that took
    another path, the agreement of the stages, the exchange of results."""
    left_plan: bool = False
    """Whether a microbatch took another path than the plan was made for."""
    traffic: OffloadStats = OffloadStats()
    """What was offloaded."""

    def since(self, zero: float) -> "Recording":
        """The same, told by a clock that showed nought at ``zero``."""
        spans = tuple(span._replace(start=span.start - zero, end=span.end - zero) for span in self.spans)
        return replace(self, spans=spans, end=self.end - zero)


class Recorded(NamedTuple):
    """A training step on this stage."""

    number: int
    """Of the step."""
    plan: Plan
    """What was to happen."""
    recording: Recording
    """What did, by the clock of this rank."""
