"""What every rank holds, counted, beside what was predicted for its stage."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import final

from smp_strategy.planning.memory.amounts import RankMemory
from smp_strategy.planning.output_file import save_report
from smp_strategy.planning.partition.costs import Held
from smp_strategy.reports.memory_tables import page, predicted_amounts, text

__all__ = ["MemoryReport"]


@final
@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What ranks held at the moment when they were asked. Saying it as text: ``print(report)``."""

    ranks: tuple[RankMemory, ...]
    """All of them, by rank."""
    predicted: tuple[Held, ...]
    """What the fullest rank of each stage was to hold; empty before the partition is decided."""
    rank: int
    """Who says this."""

    def __str__(self) -> str:
        return text(self.ranks, self.predicted)

    def to_json(self) -> str:
        """All of it as data, in bytes."""
        return json.dumps(
            {
                "ranks": [
                    {"rank": each.rank, "stage": each.stage, **each.amounts, "total": each.total} for each in self.ranks
                ],
                "predicted": [{"stage": stage, **predicted_amounts(held)} for stage, held in enumerate(self.predicted)],
                "total": sum(each.total for each in self.ranks),
            },
            indent=2,
        )

    def to_html(self) -> str:
        """A page of its own: no scripts, and nothing is loaded from elsewhere."""
        return page(self.ranks, self.predicted)

    def save(self, path: str | Path) -> None:
        """Write it to a file in the form that the ending asks for: ``.txt``, ``.json`` or ``.html``.

        All ranks may call this: global rank 0 writes, others do nothing.

        Raises:
            ConfigError: another ending.
        """
        save_report(path, self, "A memory report", is_here=self.rank == 0)
