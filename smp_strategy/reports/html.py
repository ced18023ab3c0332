"""HTML and SVG of reports: style sheet, elements, tables and drawings, with everything from outside escaped."""

from collections.abc import Iterable
from html import escape

from smp_strategy.reports.table import ReportTable

__all__ = ["KINDS", "Markup", "document", "element", "keys", "section", "svg", "table_element", "titled_table"]


class Markup(str):
    """Cell of a table that is HTML already."""


def element(name: str, *content: str, **attributes: object) -> str:
    """``<name attributes>content</name>``; attributes are escaped, ``content`` is markup already.

    Underscores in names of attributes become hyphens; one at the end is dropped (``class_``).
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_shown(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{given}>{''.join(content)}</{name}>"


def svg(width: float, height: float, *content: str, label: str) -> str:
    """SVG drawing that scales with the page.

    Args:
        width, height: Size in units of the drawing.
        content: Markup of the drawing.
        label: Description for screen readers.
    """
    return element(
        "svg",
        *content,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
        style=f"width:100%;min-width:{min(width, 640):g}px",
    )


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """Self-contained page: no scripts, and nothing is loaded from elsewhere.

    Args:
        title: Title of the window.
        body: Markup of the body.
        style: CSS rules in addition to those of all pages.
    """
    fills = [f".{kind} {{ fill: {fill}; }}\n" for kind, (_, fill) in KINDS.items()]
    head = '<meta charset="utf-8">' + element("title", title) + element("style", STYLE, *fills, style)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>'


def keys(kinds: Iterable[str]) -> str:
    """Legend of the colours of these kinds of actions."""
    present = set(kinds)
    return " &emsp; ".join(
        element("span", class_="key", style=f"background:{fill}") + f" {name}"
        for kind, (name, fill) in KINDS.items()
        if kind in present
    )


def section(title: str, caption: str, drawing: str) -> list[str]:
    """Heading, caption and drawing."""
    return [element("h2", title), element("p", caption, class_="dim"), element("figure", drawing)]


def table_element(table: ReportTable) -> str:
    """``<table>`` of ``table``, without its title and its caption; cells that are no :class:`Markup` are escaped."""
    body = [_row("td", [cell if isinstance(cell, Markup) else escape(cell) for cell in cells]) for cells in table.rows]
    return element("table", _row("th", table.columns), *body)


def titled_table(table: ReportTable) -> list[str]:
    """Heading, table and caption."""
    return [element("h2", table.title), table_element(table), element("p", table.caption, class_="dim")]


def _row(kind: str, cells: Iterable[str]) -> str:
    return element("tr", *(element(kind, cell) for cell in cells))
