"""The latest training step as it was, on all stages of a replica, beside the timetable that was predicted."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import final

from smp_strategy.pipeline.recording import Recording
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.output_file import save_report
from smp_strategy.reports.timeline.chrome_trace import chrome_trace
from smp_strategy.reports.timeline.comparison import Comparison
from smp_strategy.reports.timeline.page import page
from smp_strategy.reports.timeline.text import text

__all__ = ["Timeline"]


@final
@dataclass(frozen=True, kw_only=True)
class Timeline:
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

    def save(self, path: str | Path) -> None:
        """Write it to a file in the form that the ending asks for: ``.txt``, ``.json`` or ``.html``.

        All ranks may call this: global rank 0 writes, others do nothing.

        Raises:
            ConfigError: another ending.
        """
        save_report(path, self, "A timeline", is_here=self.rank == 0)
