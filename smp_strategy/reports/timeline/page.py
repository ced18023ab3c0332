"""HTML page of a timeline: a Gantt chart of each stage, measured above predicted, on one time axis, and tables."""

from collections.abc import Sequence
from html import escape
from math import floor, log10

from smp_strategy.config.sizes import show_seconds
from smp_strategy.pipeline.recording import Recording, Span
from smp_strategy.reports.explain.drawings import LABEL, WIDTH, block
from smp_strategy.reports.html import document, element, keys, section, svg, titled_table
from smp_strategy.reports.timeline.comparison import Comparison
from smp_strategy.reports.timeline.text import summary, tables

__all__ = ["STYLE", "drawing", "page"]

AXIS = 18.0
MEASURED, PREDICTED, GAP = 22.0, 15.0, 12.0
STAGE = MEASURED + PREDICTED + GAP
# Round distances of marks on the axis, and their approximate number.
STEPS = (1, 2, 2.5, 5, 10)
MARKS = 8
STYLE = """
.waiting { opacity: .25; } .predicted rect { opacity: .6; } .off { fill: var(--dim); opacity: .6; }
.grid { stroke: var(--line); } .end { stroke: var(--ink); } .end.then { stroke-dasharray: 3 2; }
"""


def drawing(comparison: Comparison) -> str:
    """Gantt chart of all stages."""
    length = max(comparison.seconds, comparison.plan.makespan) or 1.0
    scale = (WIDTH - LABEL - 1) / length
    height = AXIS + STAGE * len(comparison.recordings)
    parts = _axis(length, scale, height)
    for stage, recording in enumerate(comparison.recordings):
        y = AXIS + STAGE * stage + GAP / 2
        parts.append(element("text", f"stage {stage}", x=0.0, y=y + 15))
        parts.append(element("text", "predicted", x=0.0, y=y + MEASURED + 11, class_="small"))
        parts += _measured(comparison, stage, recording, y, scale)
        parts.append(element("g", *_predicted(comparison, stage, y + MEASURED + 1, scale), class_="predicted"))
    for seconds, name in ((comparison.seconds, "end"), (comparison.plan.makespan, "end then")):
        parts.append(_upright(LABEL + seconds * scale, AXIS, height, name))
    return svg(WIDTH, height, *parts, label="Each stage as it was, over what was predicted")


def _measured(comparison: Comparison, stage: int, recording: Recording, y: float, scale: float) -> list[str]:
    parts, predicted = [], comparison.predicted(stage)
    for span in recording.spans:
        start, end = predicted[span.action]
        title = _title(span, start, end)
        waited = span.waited * scale
        x, width = LABEL + span.start * scale, (span.end - span.start) * scale
        if waited > 0:
            rectangle = {"x": x, "y": y, "width": min(waited, width), "height": MEASURED - 2}
            kind = f"{span.action.kind} waiting"
            parts.append(element("rect", element("title", escape(title)), **rectangle, class_=kind))
        parts += block(span.action, x + waited, y, width - waited, MEASURED - 2, title)
    if recording.left_plan:
        start = recording.spans[-1].end
        rectangle = {"x": LABEL + start * scale, "y": y, "height": MEASURED - 2}
        title = f"off the plan: {show_seconds(start)} to {show_seconds(recording.end)}"
        width = (recording.end - start) * scale
        parts.append(element("rect", element("title", title), **rectangle, width=width, class_="off"))
    return parts


def _predicted(comparison: Comparison, stage: int, y: float, scale: float) -> list[str]:
    parts: list[str] = []
    for action, (start, end) in comparison.predicted(stage).items():
        title = f"{action}, predicted: {show_seconds(start)} to {show_seconds(end)}"
        parts += block(action, LABEL + start * scale, y, (end - start) * scale, PREDICTED - 2, title)
    return parts


def _title(span: Span, start: float, end: float) -> str:
    waited = f", {show_seconds(span.waited)} of it waiting" if span.waited > 0 else ""
    return (
        f"{span.action}: {show_seconds(span.start)} to {show_seconds(span.end)}{waited}\n"
        f"{show_seconds(span.work)} of work; predicted {show_seconds(end - start)}, from {show_seconds(start)}"
    )


def _axis(length: float, scale: float, height: float) -> list[str]:
    parts, distance = [], _distance(length)
    for number in range(floor(length / distance) + 1):
        x = LABEL + number * distance * scale
        parts.append(_upright(x, AXIS - 4, height, "grid"))
        place = "end" if x > WIDTH - 20 else "middle"
        shown = show_seconds(number * distance) if number else "0"
        parts.append(element("text", shown, x=x, y=10.0, text_anchor=place, class_="small"))
    return parts


def _distance(length: float) -> float:
    """Distance between two marks of the axis: a round number."""
    rough = length / MARKS
    power = 10.0 ** floor(log10(rough))
    return power * next(step for step in STEPS if step * power >= rough * 0.999)


def _upright(x: float, top: float, bottom: float, kind: str) -> str:
    return element("line", x1=x, x2=x, y1=top, y2=bottom, class_=kind)


def page(comparison: Comparison, ranks: Sequence[int], step: int) -> str:
    what, *more = (escape(line) for line in summary(comparison, step))
    present = keys(action.kind for actions in comparison.plan.stages for action in actions)
    caption = (
        f"{present} &emsp; pale: waits for messages &emsp; lines: the end of the step, measured and (dashed) predicted"
    )
    parts = [
        element("h1", what),
        *(element("p", line) for line in more),
        *section("As it was, over what was predicted", caption, drawing(comparison)),
        *(part for table in tables(comparison, ranks) for part in titled_table(table)),
    ]
    return document("Timeline", parts, STYLE)
