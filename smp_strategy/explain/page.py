"""The explanation as a page for a browser: one file, no scripts, nothing loaded from elsewhere."""

from collections.abc import Sequence
from html import escape

from smp_strategy.explain.drawings import colour, loads, strip, timetable
from smp_strategy.explain.svg import element
from smp_strategy.explain.text import sends_on, summary
from smp_strategy.explain.tree import Node, abbreviate, tree_of
from smp_strategy.partitioner.partition import Partition
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.sizes import show_bytes, show_seconds

__all__ = ["page"]

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1c2330, #e6e9ef); --dim: light-dark(#667085, #98a2b3);
  --line: light-dark(#e4e7ec, #344054); --page: light-dark(#fbfbfc, #12161e); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2.5rem auto;
  max-width: 64rem; padding: 0 1.5rem; }
h1 { font-size: 1.35rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 2.4rem 0 .6rem; }
p { margin: .2rem 0; } .dim { color: var(--dim); font-size: .88rem; } figure { margin: 0; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 500; color: var(--dim); font-size: .85rem; } td, th { padding: .25rem .6rem; text-align: right;
  border-bottom: 1px solid var(--line); } td { white-space: nowrap; } td:nth-child(-n+2), th:nth-child(-n+2) {
  text-align: left; }
td:nth-child(2) { white-space: normal; }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink); } svg text.title, svg text.small { fill: var(--dim); }
svg text.number { fill: #fff; font-size: 10px; pointer-events: none; }
.cut { stroke: var(--ink); stroke-dasharray: 3 2; } .limit { stroke: #d92d20; stroke-width: 2; }
.ink { fill: var(--ink); } .later { opacity: .72; } .key { display: inline-block; width: .8em; height: .8em;
  border-radius: 2px; }
details > *:not(summary) { margin-left: 1.3rem; } summary, .unit { display: flex; gap: .7rem; align-items: baseline;
  padding: .12rem 0; } summary { cursor: pointer; } summary::before { content: "+"; color: var(--dim); width: .6rem; }
details[open] > summary::before { content: "-"; } .unit { padding-left: 1.3rem; } .name { flex: 1; }
.amount { width: 6rem; text-align: right; font-variant-numeric: tabular-nums; } .chip { color: #fff; font-size: .78rem;
  border-radius: 3px; padding: 0 .45em; } .several { background: var(--dim); }
"""
KINDS = {
    "F": ("forward", "#3b7dd8"),
    "B": ("backward", "#2e9e6b"),
    "I": ("gradients of inputs", "#58b88a"),
    "W": ("gradients of weights", "#d98e1f"),
}
# Inner modules up to here are open when the page is: the blocks of a model, not what is in them.
OPEN_DEPTH = 2


def page(partition: Partition, plan: Plan | None) -> str:
    """The page as text."""
    what, *more = (escape(line) for line in summary(partition))
    parts = [
        element("h1", what),
        *(element("p", line) for line in more),
        *_section("The model, cut", "As wide as they are slow; above each cut what crosses it.", strip(partition)),
        *_section("Stages", "", loads(partition)),
        _stage_table(partition),
    ]
    if plan is not None:
        parts += _section("Timetable", f"{_keys(plan)} &emsp; idle {plan.bubble:.1%}", timetable(plan))
    parts += [element("h2", "Units"), element("p", _HEADER, class_="unit dim")]
    parts += [_tree(node, 0) for node in tree_of(partition.units)]
    fills = [f".{kind} {{ fill: {fill}; }}\n" for kind, (_, fill) in KINDS.items()]
    head = '<meta charset="utf-8">' + element("title", "Partition") + element("style", STYLE, *fills)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _keys(plan: Plan) -> str:
    """What the colours of the timetable mean."""
    kinds = {action.kind for actions in plan.stages for action in actions}
    return " &emsp; ".join(
        element("span", class_="key", style=f"background:{fill}") + f" {name}"
        for kind, (name, fill) in KINDS.items()
        if kind in kinds
    )


def _section(title: str, caption: str, drawing: str) -> list[str]:
    return [element("h2", title), element("p", caption, class_="dim"), element("figure", drawing)]


def _stage_table(partition: Partition) -> str:
    rows = [_row("th", ("stage", "units", "work", "states", "activations", "memory", "limit", "sends on"))]
    for number, stage in enumerate(partition.stages):
        names = abbreviate([unit.name for unit in partition.units if unit.stage == number])
        limit = "" if stage.memory_limit is None else show_bytes(stage.memory_limit)
        amounts = (stage.held.total, stage.activation_bytes, stage.memory_bytes)
        cells = [_chip([number]), escape(names), show_seconds(stage.seconds), *map(show_bytes, amounts)]
        rows.append(_row("td", (*cells, limit, show_bytes(sends_on(partition, number)))))
    return element("table", *rows)


def _row(kind: str, cells: Sequence[str]) -> str:
    return element("tr", *(element(kind, cell) for cell in cells))


_HEADER = "".join(
    element("span", label, class_=kind)
    for kind, label in (
        ("name", "module"),
        ("amount", "stage"),
        *(("amount", label) for label in ("time", "parameters", "states", "activations")),
    )
)


def _tree(node: Node, depth: int) -> str:
    cells = [
        element("span", escape(node.label), class_="name"),
        element("span", _chip(node.stages), class_="amount"),
        *(
            element("span", amount, class_="amount")
            for amount in (
                show_seconds(node.seconds),
                show_bytes(node.held.parameter),
                show_bytes(node.held.total),
                show_bytes(node.activation_bytes),
            )
        ),
    ]
    if not node.children:
        return element("div", *cells, class_="unit")
    opened = {"open": "open"} if depth < OPEN_DEPTH else {}
    below = [_tree(child, depth + 1) for child in node.children]
    return element("details", element("summary", *cells), *below, **opened)


def _chip(stages: Sequence[int]) -> str:
    if len(stages) == 1:
        return element("span", str(stages[0]), class_="chip", style=f"background:{colour(stages[0])}")
    return element("span", abbreviate([str(stage) for stage in stages]), class_="chip several")
