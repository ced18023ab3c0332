"""Timeline of the latest training step: measured actions of all stages beside the simulated schedule."""

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
    """Measured and predicted actions of a training step on all stages. ``print(timeline)`` shows it as text."""

    plan: Plan
    """Simulated schedule."""
    stages: tuple[Recording, ...]
    """Recording of each stage, in seconds since the first stage began to work."""
    ranks: tuple[int, ...]
    """Global rank of each stage."""
    step: int
    """Number of the training step, from 1."""
    rank: int
    """Global rank of this process."""
    noun: ClassVar[str] = "A timeline"

    @property
    def writes_here(self) -> bool:
        """On global rank 0."""
        return self.rank == 0

    @property
    def comparison(self) -> Comparison:
        """Measured times beside the predicted ones."""
        return Comparison(self.plan, self.stages)

    def __str__(self) -> str:
        return text(self.comparison, self.ranks, self.step)

    def to_json(self, only: Collection[int] | None = None) -> str:
        """Trace for https://ui.perfetto.dev or chrome://tracing: two rows for each rank, measured and predicted."""
        return chrome_trace(self.comparison, self.ranks, {"step": self.step}, only)

    def to_html(self) -> str:
        """Self-contained page with a Gantt chart, without scripts."""
        return page(self.comparison, self.ranks, self.step)
