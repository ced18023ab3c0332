"""The timeline for a terminal: what the step took, the stages over time, and where it was slower than predicted."""

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from smp_strategy.config.sizes import show_bytes, show_count, show_seconds
from smp_strategy.pipeline.schedule import Action
from smp_strategy.reports.explain.text import WIDTH
from smp_strategy.reports.timeline.comparison import Comparison

__all__ = ["Cells", "summary", "tables", "text"]

NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
COLUMNS = WIDTH - 20
# So many actions that were not carried out are named.
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


class Cells(NamedTuple):
    """A table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


def text(comparison: Comparison, ranks: Sequence[int], step: int) -> str:
    """All of it."""
    console = Console(file=io.StringIO(), width=WIDTH, no_color=True, markup=False, emoji=False)
    for line in summary(comparison, step):
        console.print(line, highlight=False)
    console.print("\n" + "\n".join(_lanes(comparison)) + f"\n{'':20}{LEGEND}\n", highlight=False, soft_wrap=True)
    for given in tables(comparison, ranks):
        table = Table(title=given.title, title_justify="left", caption=given.caption, caption_justify="left")
        for number, name in enumerate(given.columns):
            table.add_column(name, justify="left" if number < 2 else "right")
        for row in given.rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


def summary(comparison: Comparison, step: int) -> list[str]:
    """What the step took, a line each."""
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


def tables(comparison: Comparison, ranks: Sequence[int]) -> list[Cells]:
    """Where the seconds of the stages have gone, and how long actions of each kind took."""
    has_traffic = any(recording.traffic.bytes_out for recording in comparison.recordings)
    return [
        _of_stages(comparison, ranks),
        _of_kinds(comparison),
        *([_of_traffic(comparison, ranks)] if has_traffic else []),
    ]


def _of_stages(comparison: Comparison, ranks: Sequence[int]) -> Cells:
    columns = ["stage", "rank", "work", "predicted", "ratio", "waiting", "between", "before and after"]
    has_left = bool(comparison.left_plan)
    rows = []
    for stage, rank in enumerate(ranks):
        found = comparison.stage(stage)
        ratio = _shown(found.work / found.predicted if found.predicted else None)
        amounts = [found.waiting, found.between, found.outside, *([found.off_plan] * has_left)]
        work = [show_seconds(found.work), show_seconds(found.predicted), ratio]
        rows.append([str(stage), str(rank), *work, *map(show_seconds, amounts)])
    return Cells("Stages", columns + ["off the plan"] * has_left, rows, CAPTION)


def _of_kinds(comparison: Comparison) -> Cells:
    rows = [
        [
            *(found.kind, NAMES[found.kind], str(found.number)),
            *(show_seconds(found.work), show_seconds(found.predicted), _shown(found.ratio)),
        ]
        for found in comparison.kinds()
    ]
    columns = ["", "kind", "number", "work", "predicted", "ratio"]
    return Cells("Actions", columns, rows, "medians; work: without waiting")


def _of_traffic(comparison: Comparison, ranks: Sequence[int]) -> Cells:
    rows = []
    for stage, (rank, recording) in enumerate(zip(ranks, comparison.recordings, strict=True)):
        traffic = recording.traffic
        amounts = map(show_bytes, (traffic.bytes_out, traffic.bytes_in, traffic.most_on_host))
        rows.append([str(stage), str(rank), *amounts, str(traffic.num_late), str(traffic.num_held_up)])
    columns = ["stage", "rank", "out", "in", "most on host", "late", "held up"]
    return Cells("Offloaded activations", columns, rows, TRAFFIC_CAPTION)


def _lanes(comparison: Comparison) -> Iterable[str]:
    """Each stage as it was, and under it as it was predicted; a letter for each moment."""
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
    more = "longer" if seconds > predicted else "less"
    return f", {abs(seconds / predicted - 1):.0%} {more} than the {show_seconds(predicted)} that were predicted"


def _shown(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
