"""The decision with its reasons, for a reader, for a program, and for a browser."""

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
    """Which unit is on which stage, what that costs, and what limits it.

    Saying it as text: ``print(explanation)``.
    """

    partition: Partition
    plan: Plan | None = None
    """The timetable of a training step, where one is known."""
    noun: ClassVar[str] = "An explanation"

    @property
    def writes_here(self) -> bool:
        """Always: every rank has the same partition."""
        return True

    def __str__(self) -> str:
        return text(self.partition, self.plan)

    def to_json(self) -> str:
        """All of it as data: the partition as ``partition_file`` has it, what follows from it, and the timetable."""
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
        """A page of its own, with drawings: no scripts, and nothing is loaded from elsewhere."""
        return page(self.partition, self.plan)


def _timetable(plan: Plan) -> list[list[dict[str, object]]]:
    return [
        [
            {"action": str(action), "start": start, "end": end}
            for action, (start, end) in zip(actions, spans, strict=True)
        ]
        for actions, spans in zip(plan.stages, plan.times, strict=True)
    ]
