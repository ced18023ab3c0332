"""Chrome trace of a timeline: JSON in the trace event format, for Perfetto (https://ui.perfetto.dev), chrome://tracing.

A rank is a process with two rows, the measured actions and below them the predicted ones, named as in the plan. Waiting
is a slice of its own inside of its action; its place within the action is not recorded, and a stage usually waits
before it works, so the slice is at the beginning.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from smp_strategy.pipeline.schedule import Action
from smp_strategy.reports.timeline.comparison import Comparison

__all__ = ["chrome_trace"]

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
