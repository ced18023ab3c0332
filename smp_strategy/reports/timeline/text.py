"""Plain text of a timeline: time of the step, lanes of stages over time, tables of measured against predicted times."""

from collections.abc import Iterable, Sequence

from smp_strategy.config.sizes import show_bytes, show_count, show_seconds
from smp_strategy.pipeline.schedule import Action
from smp_strategy.reports.html import KINDS
from smp_strategy.reports.table import WIDTH, ReportTable, Unwrapped, render_text
from smp_strategy.reports.timeline.comparison import Comparison

__all__ = ["summary", "tables", "text"]

COLUMNS = WIDTH - 20
# Missing actions that are named.
MOST_MISSING = 8
CAPTION = (
    "waiting: for messages, inside of actions; between: between actions, where microbatches take turns; before and "
    "after: the stage's first action and its last"
)
TRAFFIC_CAPTION = (
    "late: times that something was read before its copy was begun; held up: times that memory was needed again before "
    "its copy to the host was known to be done"
)
LEGEND = "capitals: even microbatches; ·: waits for messages; ~: off the plan"


def text(comparison: Comparison, ranks: Sequence[int], step: int) -> str:
    """Text of the whole timeline."""
    lanes = Unwrapped("\n" + "\n".join(_lanes(comparison)) + f"\n{'':20}{LEGEND}\n")
    parts = [part for table in tables(comparison, ranks) for part in (table, "")]
    return render_text([*summary(comparison, step), lanes, *parts[:-1]])


def summary(comparison: Comparison, step: int) -> list[str]:
    """Lines about the time of the step, and about stages that left the plan."""
    stages = show_count(len(comparison.recordings), "stage")
    lines = [
        f"Training step {step} took {show_seconds(comparison.seconds)} on {stages}"
        f"{_against(comparison.seconds, comparison.plan.makespan)}.",
        f"It took {show_seconds(comparison.seconds_to_end)} more until the stages had agreed and shared their results.",
    ]
    for stage in comparison.left_plan:
        missing = comparison.missing(stage)
        named = " ".join(map(str, missing[:MOST_MISSING])) + (" ..." if len(missing) > MOST_MISSING else "")
        lines.append(
            f"Stage {stage} has left its plan, because a microbatch took another path than the plan was made for. "
            f"{len(missing)} of its actions are missing, since they never ran as such{': ' if named else ''}{named}."
        )
    return lines


def tables(comparison: Comparison, ranks: Sequence[int]) -> list[ReportTable]:
    """Tables of the time of stages, of actions by kind, and of offloaded activations if there are any."""
    has_traffic = any(recording.traffic.bytes_out for recording in comparison.recordings)
    return [
        _of_stages(comparison, ranks),
        _of_kinds(comparison),
        *([_of_traffic(comparison, ranks)] if has_traffic else []),
    ]


def _of_stages(comparison: Comparison, ranks: Sequence[int]) -> ReportTable:
    columns = ["stage", "rank", "work", "predicted", "ratio", "waiting", "between", "before and after"]
    has_left = bool(comparison.left_plan)
    rows = []
    for stage, rank in enumerate(ranks):
        found = comparison.stage(stage)
        ratio = _shown(found.work / found.predicted if found.predicted else None)
        amounts = [found.waiting, found.between, found.outside, *([found.off_plan] * has_left)]
        work = [show_seconds(found.work), show_seconds(found.predicted), ratio]
        rows.append([str(stage), str(rank), *work, *map(show_seconds, amounts)])
    columns += ["off the plan"] * has_left
    return ReportTable(title="Stages", columns=columns, rows=rows, caption=CAPTION)


def _of_kinds(comparison: Comparison) -> ReportTable:
    rows = [
        [
            *(found.kind, KINDS[found.kind][0], str(found.number)),
            *(show_seconds(found.work), show_seconds(found.predicted), _shown(found.ratio)),
        ]
        for found in comparison.kinds()
    ]
    columns = ["", "kind", "number", "work", "predicted", "ratio"]
    return ReportTable(title="Actions", columns=columns, rows=rows, caption="medians; work: without waiting")


def _of_traffic(comparison: Comparison, ranks: Sequence[int]) -> ReportTable:
    rows = []
    for stage, (rank, recording) in enumerate(zip(ranks, comparison.recordings, strict=True)):
        traffic = recording.traffic
        amounts = map(show_bytes, (traffic.bytes_out, traffic.bytes_in, traffic.most_on_host))
        rows.append([str(stage), str(rank), *amounts, str(traffic.num_late), str(traffic.num_held_up)])
    columns = ["stage", "rank", "out", "in", "most on host", "late", "held up"]
    return ReportTable(title="Offloaded activations", columns=columns, rows=rows, caption=TRAFFIC_CAPTION)


def _lanes(comparison: Comparison) -> Iterable[str]:
    """Lane of each stage as measured, and below it as predicted; a letter per moment."""
    length = max(comparison.seconds, comparison.plan.makespan) or 1.0
    for stage, recording in enumerate(comparison.recordings):
        lane = [" "] * COLUMNS
        for span in recording.spans:
            works_from = span.start + span.waited
            _fill(lane, "·", span.start / length, works_from / length)
            _fill(lane, _letter(span.action), works_from / length, span.end / length)
        if recording.left_plan:
            _fill(lane, "~", recording.spans[-1].end / length, recording.end / length)
        yield f"{f'stage {stage}':<10}measured  {''.join(lane)}"
        lane = [" "] * COLUMNS
        for action, (start, end) in comparison.predicted(stage).items():
            _fill(lane, _letter(action), start / length, end / length)
        yield f"{'':10}predicted {''.join(lane)}"


def _fill(lane: list[str], letter: str, start: float, end: float) -> None:
    for column in range(max(round(start * COLUMNS), 0), min(round(end * COLUMNS), COLUMNS)):
        lane[column] = letter


def _letter(action: Action) -> str:
    return action.kind if action.microbatch % 2 == 0 else action.kind.lower()


def _against(seconds: float, predicted: float) -> str:
    if not predicted:
        return ""
    if seconds > 2 * predicted:  # a nominal machine was modelled, or a first step measured
        return f", {seconds / predicted:.3g} times the {show_seconds(predicted)} that were predicted"
    more = "longer" if seconds > predicted else "less"
    return f", {abs(seconds / predicted - 1):.0%} {more} than the {show_seconds(predicted)} that were predicted"


def _shown(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
