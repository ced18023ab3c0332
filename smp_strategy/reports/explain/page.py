"""The explanation as a page for a browser."""

from collections.abc import Sequence
from html import escape

from smp_strategy.config.sizes import show_bytes, show_seconds
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.explain.drawings import colour, loads, strip, timetable
from smp_strategy.reports.explain.html import document, element, keys, row, section
from smp_strategy.reports.explain.module_tree import ModuleNode, abbreviate, tree_of
from smp_strategy.reports.explain.text import sends_on, summary, waiting
from smp_strategy.reports.explain.text_activations import RELIEF_CAPTION, RELIEF_COLUMNS, relief_rows

__all__ = ["page"]

# Inner modules up to here are open when the page is: the blocks of a model, not what is in them.
OPEN_DEPTH = 2


def page(partition: Partition, plan: Plan | None) -> str:
    """The page as text."""
    what, *more = (escape(line) for line in summary(partition))
    parts = [
        element("h1", what),
        *(element("p", line) for line in more),
        *section("The model, cut", "As wide as they are slow; above each cut what crosses it.", strip(partition)),
        *section("Stages", "", loads(partition)),
        _stage_table(partition),
    ]
    if plan is not None:
        known = keys(action.kind for actions in plan.stages for action in actions)
        parts += section("Timetable", f"{known} &emsp; {waiting(plan)}", timetable(plan))
    if partition.treatments:
        rows = [row("td", [escape(cell) for cell in cells]) for cells in relief_rows(partition)]
        parts += [element("h2", "Kept for backward"), element("p", RELIEF_CAPTION, class_="dim")]
        parts.append(element("table", row("th", RELIEF_COLUMNS), *rows))
    parts += [element("h2", "Units"), element("p", _HEADER, class_="unit dim")]
    parts += [_tree(node, 0) for node in tree_of(partition.units)]
    return document("Partition", parts)


def _stage_table(partition: Partition) -> str:
    has_passing = any(stage.held.passing for stage in partition.stages)
    columns = ("stage", "units", "work", "states", *["passing"] * has_passing, "activations", "memory", "limit")
    rows = [row("th", (*columns, "sends on"))]
    for number, stage in enumerate(partition.stages):
        names = abbreviate([unit.name for unit in partition.units if unit.stage == number])
        limit = "" if stage.memory_limit is None else show_bytes(stage.memory_limit)
        passing = [stage.held.passing] * has_passing
        amounts = (stage.held.states, *passing, stage.activation_bytes, stage.memory_bytes)
        cells = [_chip([number]), escape(names), show_seconds(stage.seconds), *map(show_bytes, amounts)]
        rows.append(row("td", (*cells, limit, show_bytes(sends_on(partition, number)))))
    return element("table", *rows)


_HEADER = "".join(
    element("span", label, class_=kind)
    for kind, label in (
        ("name", "module"),
        ("amount", "stage"),
        *(("amount", label) for label in ("time", "parameters", "states", "activations")),
    )
)


def _tree(node: ModuleNode, depth: int) -> str:
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
