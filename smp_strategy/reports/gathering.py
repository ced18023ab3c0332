"""From what each rank counts to the memory report, on every rank."""

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.planning.memory.counting import Spread, count
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.memory_report import MemoryReport

__all__ = ["memory_report"]


def memory_report(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    mesh: ProcessMesh,
    partition: Partition | None,
    spread: Spread | None = None,
    *,
    copies: int = 0,
) -> MemoryReport:
    """What all ranks hold now; collective over all of them, outside of steps.

    Args:
        module: all of it, of which this rank may have a part.
        optimizers: what trains it.
        mesh: where the ranks stand.
        partition: what was predicted; ``None`` before it is decided.
        spread: what is known of parameters that are spread over shard groups; ``None``: there are none.
        copies: bytes of the half-precision copies of parameters that this rank's units compute with.
    """
    mine = count(module, optimizers, mesh, spread, copies=copies)
    told = collectives.gather_objects(mine, "what ranks hold in memory")
    predicted = () if partition is None else tuple(stage.held for stage in partition.stages)
    return MemoryReport(ranks=tuple(told), predicted=predicted, rank=mesh.rank)
