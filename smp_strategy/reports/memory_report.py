"""Memory report: measured bytes of every rank beside the prediction for its stage, gathered on every rank."""

import json
from dataclasses import dataclass
from typing import ClassVar, final

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.planning.memory.sharded import RankMemory
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.planning.partition.problem import HeldBytes
from smp_strategy.reports.memory_tables import page, predicted_amounts, text
from smp_strategy.reports.report import Report

__all__ = ["MemoryReport", "memory_report"]


@final
@dataclass(frozen=True, kw_only=True)
class MemoryReport(Report):
    """Memory of all ranks at the time of the call. ``print(report)`` shows it as text."""

    ranks: tuple[RankMemory, ...]
    """Measured memory of all ranks, by rank."""
    predicted: tuple[HeldBytes, ...]
    """Predicted memory of the fullest rank of each stage; empty before the partition is decided."""
    rank: int
    """Global rank of this process."""
    noun: ClassVar[str] = "A memory report"

    @property
    def writes_here(self) -> bool:
        """On global rank 0."""
        return self.rank == 0

    def __str__(self) -> str:
        return text(self.ranks, self.predicted)

    def to_json(self) -> str:
        """All amounts as data, in bytes."""
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
        """Self-contained page without scripts."""
        return page(self.ranks, self.predicted)


def memory_report(mine: RankMemory, partition: Partition | None) -> MemoryReport:
    """Memory report of all ranks; collective over all of them, outside of steps.

    Args:
        mine: Memory of this rank (:func:`smp_strategy.planning.memory.counting.count`).
        partition: Partition with its predictions; ``None`` before it is decided.
    """
    told = collectives.gather_objects(mine, "what ranks hold in memory")
    predicted = () if partition is None else tuple(stage.held for stage in partition.stages)
    return MemoryReport(ranks=tuple(told), predicted=predicted, rank=mine.rank)
