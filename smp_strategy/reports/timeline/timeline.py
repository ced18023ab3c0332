"""Timeline of the latest training step: measured actions of all stages beside the simulated schedule.

Chrome trace of a timeline: JSON in the trace event format, for Perfetto (https://ui.perfetto.dev), chrome://tracing.

A rank is a process with two rows, the measured actions and below them the predicted ones, named as in the plan. Waiting
is a slice of its own inside of its action; its place within the action is not recorded, and a stage usually waits
before it works, so the slice is at the beginning.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from smp_strategy.pipeline.recording import Recording
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.reports.report import Report
from smp_strategy.reports.timeline.comparison import Comparison
from smp_strategy.reports.timeline.page import page
from smp_strategy.reports.timeline.text import text

__all__ = ["Timeline"]

# Offsets of thread numbers from the process number: numbers are unique, and the measured row has that of its process,
# like a main thread, so that viewers show it first.
MEASURED, PREDICTED = 0, 1_000_000


def chrome_trace(
    comparison: Comparison, ranks: Sequence[int], facts: dict[str, Any], only: Collection[int] | None = None
) -> str:
    """JSON of the trace.

    Args:
        comparison: Measured and predicted actions.
        ranks: Global rank of each stage.
        facts: Further metadata of the step.
        only: Ranks in the trace; ``None``: all.
    """
    events: list[dict[str, Any]] = []
    for stage, rank in enumerate(ranks):
        if only is None or rank in only:
            events += _names(stage, rank)
            events += _measured(comparison, stage, rank)
            events += _predicted(comparison, stage, rank)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})


def _names(stage: int, rank: int) -> Iterator[dict[str, Any]]:
    def meta(what: str, row: int, value: dict[str, Any]) -> dict[str, Any]:
        return {"name": what, "ph": "M", **_place(rank, row), "args": value}

    yield meta("process_name", MEASURED, {"name": f"stage {stage} (rank {rank})"})
    yield meta("process_sort_index", MEASURED, {"sort_index": stage})
    for row, name in ((MEASURED, "measured"), (PREDICTED, "predicted")):
        yield meta("thread_name", row, {"name": name})
        yield meta("thread_sort_index", row, {"sort_index": row})


def _measured(comparison: Comparison, stage: int, rank: int) -> Iterator[dict[str, Any]]:
    recording, predicted = comparison.recordings[stage], comparison.predicted(stage)
    for span in recording.spans:
        start, end = predicted[span.action]
        about = {
            **_about(span.action),
            "work_us": _micro(span.work),
            "waited_us": _micro(span.waited),
            "predicted_start_us": _micro(start),
            "predicted_us": _micro(end - start),
        }
        yield _slice(str(span.action), "measured", rank, MEASURED, span.start, span.end, about)
        if span.waited > 0:
            waited = span.start + min(span.waited, span.end - span.start)
            yield _slice("waiting", "waiting", rank, MEASURED, span.start, waited, {})
    if recording.left_plan:
        start = recording.spans[-1].end
        missing = " ".join(map(str, comparison.missing(stage)))
        yield _slice("off the plan", "measured", rank, MEASURED, start, recording.end, {"missing": missing})


def _predicted(comparison: Comparison, stage: int, rank: int) -> Iterator[dict[str, Any]]:
    for action, (start, end) in comparison.predicted(stage).items():
        yield _slice(str(action), "predicted", rank, PREDICTED, start, end, _about(action))


def _about(action: Action) -> dict[str, Any]:
    return {"microbatch": action.microbatch, "segment": action.segment}


def _slice(
    name: str, category: str, rank: int, row: int, start: float, end: float, about: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": _micro(start), "dur": round(_micro(end) - _micro(start), 3)}
    return {"name": name, "cat": category, "ph": "X", **_place(rank, row), **times, "args": about}


def _place(rank: int, row: int) -> dict[str, int]:
    process = rank + 1  # 0 is the idle process of Linux
    return {"pid": process, "tid": process + row}


def _micro(seconds: float) -> float:
    # Microseconds with the nanosecond resolution of the clock.
    return round(seconds * 1e6, 3)


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
