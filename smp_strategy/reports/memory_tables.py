"""Table of the memory report, for a terminal and a browser: measured and predicted bytes, stage by stage."""

from collections.abc import Mapping, Sequence
from html import escape

from smp_strategy.config.sizes import show_bytes
from smp_strategy.planning.memory.sharded import RankMemory
from smp_strategy.planning.partition.problem import HeldBytes
from smp_strategy.reports.html import document, element, table_element
from smp_strategy.reports.table import ReportTable, render_text

__all__ = ["page", "predicted_amounts", "text"]

KINDS = ("parameters", "gathered", "gradients", "optimizer", "buffers")
COLUMNS = ("stage", "rank", *KINDS, "total")
CAPTION = (
    "Counted between steps, so without activations; parameters: between uses; gathered: values of all ranks, at most "
    "at a time; predicted: for the fullest rank of the stage"
)


def predicted_amounts(held: HeldBytes) -> dict[str, int]:
    """Predicted bytes of the kinds that are measured; buffers have no prediction."""
    return {
        "parameters": held.parameter,
        "gathered": held.gathered,
        "gradients": held.gradient,
        "optimizer": held.optimizer,
    }


def text(ranks: Sequence[RankMemory], predicted: Sequence[HeldBytes]) -> str:
    """Memory report as plain text."""
    return render_text([_table(ranks, predicted)])


def page(ranks: Sequence[RankMemory], predicted: Sequence[HeldBytes]) -> str:
    """Memory report as an HTML page."""
    table = _table(ranks, predicted)
    heading, caption = element("h1", escape(table.title)), element("p", table.caption, class_="dim")
    return document("Memory", [heading, table_element(table), caption])


def _table(ranks: Sequence[RankMemory], predicted: Sequence[HeldBytes]) -> ReportTable:
    rows = _rows(ranks, predicted)
    return ReportTable(title=_summary(ranks), columns=COLUMNS, rows=rows, caption=CAPTION, has_total=True)


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
