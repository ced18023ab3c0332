"""Explanation of a partition: the decision with its costs and limits, as text, JSON and HTML.

The page has a summary, drawings, stages, the schedule, and the tree of units.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import ClassVar, final

from smp_strategy.config.sizes import show_bytes, show_seconds
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.explain.drawings import colour, loads, strip, timetable
from smp_strategy.reports.explain.module_tree import ModuleNode, abbreviate, tree_of
from smp_strategy.reports.explain.text import relief_table, sends_on, summary, text, waiting
from smp_strategy.reports.html import Markup, document, element, keys, section, table_element
from smp_strategy.reports.report import Report
from smp_strategy.reports.table import ReportTable

__all__ = ["Explanation"]

# Depth up to which inner modules are expanded at first: the blocks of a model, but not their parts.
OPEN_DEPTH = 2


def page(partition: Partition, plan: Plan | None) -> str:
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
    if partition.activation_policies:
        kept = relief_table(partition)
        parts += [element("h2", kept.title), element("p", kept.caption, class_="dim"), table_element(kept)]
    parts += [element("h2", "Units"), element("p", _HEADER, class_="unit dim")]
    parts += [_tree(node, 0) for node in tree_of(partition.units)]
    return document("Partition", parts)


def _stage_table(partition: Partition) -> str:
    has_passing = any(stage.held.passing for stage in partition.stages)
    columns = ("stage", "units", "work", "states", *["passing"] * has_passing)
    columns = (*columns, "activations", "working", "memory", "limit")
    rows = []
    for number, stage in enumerate(partition.stages):
        names = abbreviate([unit.name for unit in partition.units if unit.stage == number])
        limit = "" if stage.memory_limit is None else show_bytes(stage.memory_limit)
        most = stage.fullest
        amounts = (most.states, *[most.gathered] * has_passing, most.activations, most.working, most.total)
        cells = [Markup(_chip([number])), names, show_seconds(stage.seconds), *map(show_bytes, amounts)]
        rows.append([*cells, limit, show_bytes(sends_on(partition, number))])
    return table_element(ReportTable(columns=(*columns, "sends on"), rows=rows))


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


@final
@dataclass(frozen=True)
class Explanation(Report):
    """Stage of every unit, with costs and bottleneck. ``print(explanation)`` shows it as text."""

    partition: Partition
    plan: Plan | None = None
    """Schedule of a training step; ``None`` if none is known."""
    noun: ClassVar[str] = "An explanation"

    @property
    def writes_here(self) -> bool:
        """Always: every rank has the same partition."""
        return True

    def __str__(self) -> str:
        return text(self.partition, self.plan)

    def to_json(self) -> str:
        """Partition as in ``partition_file``, figures derived from it, and the schedule, as data."""
        partition = self.partition
        return json.dumps(
            {
                **json.loads(partition.to_json()),
                "balance": partition.balance,
                "bubble": partition.bubble,
                "gap": partition.gap,
                "period_seconds": None if self.plan is None else self.plan.period,
                "timetable": None if self.plan is None else _timetable(self.plan),
            },
            indent=2,
        )

    def to_html(self) -> str:
        """Self-contained page with drawings, without scripts."""
        return page(self.partition, self.plan)


def _timetable(plan: Plan) -> list[list[dict[str, object]]]:
    return [
        [
            {"action": str(action), "start": start, "end": end}
            for action, (start, end) in zip(actions, spans, strict=True)
        ]
        for actions, spans in zip(plan.stages, plan.times, strict=True)
    ]
