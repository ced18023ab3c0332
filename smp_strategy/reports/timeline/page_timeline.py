"""The timeline as a page for a browser."""

from collections.abc import Sequence
from html import escape

from smp_strategy.reports.explain.html import document, keys, row, section
from smp_strategy.reports.explain.svg import element
from smp_strategy.reports.timeline.comparison import Comparison
from smp_strategy.reports.timeline.page import STYLE, drawing
from smp_strategy.reports.timeline.text import Cells, summary, tables

__all__ = ["page"]


def page(comparison: Comparison, ranks: Sequence[int], step: int) -> str:
    """The page as text."""
    what, *more = (escape(line) for line in summary(comparison, step))
    present = keys(action.kind for actions in comparison.plan.stages for action in actions)
    caption = (
        f"{present} &emsp; pale: waits for messages &emsp; lines: the end of the step, measured and (dashed) predicted"
    )
    parts = [
        element("h1", what),
        *(element("p", line) for line in more),
        *section("As it was, over what was predicted", caption, drawing(comparison)),
        *(part for table in tables(comparison, ranks) for part in _table(table)),
    ]
    return document("Timeline", parts, STYLE)


def _table(table: Cells) -> list[str]:
    rows = [row("td", [escape(cell) for cell in cells]) for cells in table.rows]
    return [
        element("h2", table.title),
        element("table", row("th", table.columns), *rows),
        element("p", table.caption, class_="dim"),
    ]
