"""Explanation of a partition: the decision with its costs and limits, as text, JSON and HTML."""

import json
from dataclasses import dataclass
from typing import ClassVar, final

from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.explain.page import page
from smp_strategy.reports.explain.text import text
from smp_strategy.reports.report import Report

__all__ = ["Explanation"]


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
