"""The memory report as a table, for a terminal and for a browser: stage by stage, counted and predicted."""

import io
from collections.abc import Mapping, Sequence
from html import escape

from rich.console import Console
from rich.table import Table

from smp_strategy.config.sizes import show_bytes
from smp_strategy.planning.memory.amounts import RankMemory
from smp_strategy.planning.partition.problem import HeldBytes
from smp_strategy.reports.explain.html import document, element, row
from smp_strategy.reports.explain.text import WIDTH

__all__ = ["page", "predicted_amounts", "text"]

KINDS = ("parameters", "gathered", "gradients", "optimizer", "buffers")
COLUMNS = ("stage", "rank", *KINDS, "total")
CAPTION = (
    "Counted between steps, so without activations; parameters: between uses; gathered: values of all ranks, at most "
    "at a time; predicted: for the fullest rank of the stage"
)


def predicted_amounts(held: HeldBytes) -> dict[str, int]:
    """What is counted of what was predicted; nothing is said of buffers."""
    return {
        "parameters": held.parameter,
        "gathered": held.gathered,
        "gradients": held.gradient,
        "optimizer": held.optimizer,
    }


def text(ranks: Sequence[RankMemory], predicted: Sequence[HeldBytes]) -> str:
    """As text."""
    table = Table(title=_summary(ranks), title_justify="left", caption=CAPTION, caption_justify="left")
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number < 2 else "right")
    *rows, last = _rows(ranks, predicted)
    for cells in rows:
        table.add_row(*cells)
    table.add_section()
    table.add_row(*last)
    console = Console(file=io.StringIO(), width=WIDTH, no_color=True, markup=False, emoji=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def page(ranks: Sequence[RankMemory], predicted: Sequence[HeldBytes]) -> str:
    """As a page."""
    rows = [row("td", [escape(cell) for cell in cells]) for cells in _rows(ranks, predicted)]
    parts = [
        element("h1", escape(_summary(ranks))),
        element("table", row("th", COLUMNS), *rows),
        element("p", CAPTION, class_="dim"),
    ]
    return document("Memory", parts)


def _summary(ranks: Sequence[RankMemory]) -> str:
    fullest = max(ranks, key=lambda each: each.total)
    total = show_bytes(sum(each.total for each in ranks))
    if len(ranks) == 1:
        return f"The one rank holds {total}"
    return f"{len(ranks)} ranks hold {total}, the fullest of them (rank {fullest.rank}) {show_bytes(fullest.total)}"


def _rows(ranks: Sequence[RankMemory], predicted: Sequence[HeldBytes]) -> list[list[str]]:
    rows = []
    for stage in sorted({each.stage for each in ranks}):
        rows += [_row(str(stage), str(each.rank), each.amounts) for each in ranks if each.stage == stage]
        if predicted:
            rows.append(_row("", "predicted", predicted_amounts(predicted[stage])))
    together = {kind: sum(each.amounts[kind] for each in ranks) for kind in KINDS}
    return [*rows, _row("all", "", together)]


def _row(stage: str, rank: str, amounts: Mapping[str, int]) -> list[str]:
    shown = [show_bytes(amounts[kind]) if kind in amounts else "" for kind in KINDS]
    return [stage, rank, *shown, show_bytes(sum(amounts.values()))]
