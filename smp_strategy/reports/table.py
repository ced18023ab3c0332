"""Tables and plain text of reports: one table type, and its rendering for a terminal."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from rich.console import Console
from rich.table import Table

__all__ = ["WIDTH", "ReportTable", "Unwrapped", "render_text"]

# Columns of a terminal.
WIDTH = 118


class Unwrapped(str):
    """Text whose lines may be longer than :data:`WIDTH`: timetables and lanes would be unreadable if wrapped."""


@final
@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """Rows of text under named columns."""

    title: str = ""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    num_left: int = 2
    """Number of left-aligned columns; the others are right-aligned."""
    has_total: bool = False
    """Whether the last row is set off from the others."""


def render_text(parts: Iterable[str | ReportTable]) -> str:
    """Plain text of ``parts``, one below the other, without trailing spaces.

    Args:
        parts: Paragraphs, wrapped to :data:`WIDTH` unless :class:`Unwrapped`, and tables.
    """
    file = io.StringIO()
    # Names of modules come from the user: no markup, no emoji codes.
    console = Console(file=file, width=WIDTH, no_color=True, markup=False, emoji=False)
    for part in parts:
        if isinstance(part, ReportTable):
            console.print(_rich_table(part))
        else:
            console.print(part, highlight=False, soft_wrap=isinstance(part, Unwrapped))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _rich_table(table: ReportTable) -> Table:
    shown = Table(
        title=table.title or None, title_justify="left", caption=table.caption or None, caption_justify="left"
    )
    for number, name in enumerate(table.columns):
        shown.add_column(name, justify="left" if number < table.num_left else "right")
    for number, row in enumerate(table.rows):
        shown.add_row(*row, end_section=table.has_total and number == len(table.rows) - 2)
    return shown
