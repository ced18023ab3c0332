"""The latest training step as it was, on all stages of a replica, beside the timetable that was predicted."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, final

from smp_strategy.pipeline.recording import Recording
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.reports.report import Report
from smp_strategy.reports.timeline.chrome_trace import chrome_trace
from smp_strategy.reports.timeline.comparison import Comparison
from smp_strategy.reports.timeline.page import page
from smp_strategy.reports.timeline.text import text

__all__ = ["Timeline"]


@final
@dataclass(frozen=True, kw_only=True)
class Timeline(Report):
    """What really happened. Saying it as text: ``print(timeline)``."""

    plan: Plan
    """What was to happen."""
    stages: tuple[Recording, ...]
    """What each stage did, in seconds since the first of them began to work."""
    ranks: tuple[int, ...]
    """Global rank of each stage."""
    step: int
    """Number of the training step, from 1."""
    rank: int
    """Who says this."""
    noun: ClassVar[str] = "A timeline"

    @property
    def writes_here(self) -> bool:
        """On global rank 0."""
        return self.rank == 0

    @property
    def comparison(self) -> Comparison:
        """What the step took, beside what was predicted."""
        return Comparison(self.plan, self.stages)

    def __str__(self) -> str:
        return text(self.comparison, self.ranks, self.step)

    def to_json(self, only: Collection[int] | None = None) -> str:
        """A trace for https://ui.perfetto.dev or chrome://tracing: two rows for each rank, measured and predicted.

        Args:
            only: global ranks that are to be in it; ``None``: all.
        """
        return chrome_trace(self.comparison, self.ranks, {"step": self.step}, only)

    def to_html(self) -> str:
        """A page of its own with a picture: no scripts, and nothing is loaded from elsewhere."""
        return page(self.comparison, self.ranks, self.step)
