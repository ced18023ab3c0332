"""What an engine can tell: why its plan is what it is, when things happened, where memory went."""

from collections.abc import Sequence
from datetime import timedelta

from torch import nn
from torch.optim import Optimizer

from smp_strategy.activations.offload_stats import OffloadStats
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.engine.hooks.views import Views
from smp_strategy.engine.local_model import LocalModel
from smp_strategy.engine.parallelize import Parallelizer
from smp_strategy.engine.unit_calls import UnitCalls
from smp_strategy.errors import SMPError
from smp_strategy.pipeline.recording import Recorded
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.explain.explanation import Explanation
from smp_strategy.reports.memory_report import MemoryReport, memory_report
from smp_strategy.reports.timeline.clocks import gather
from smp_strategy.reports.timeline.timeline import Timeline

__all__ = ["Inspection"]


class Inspection:
    """The reports of an :class:`~smp_strategy.engine.engine.Engine`, whose attributes these are."""

    config: SMPConfig
    views: Views
    _calls: UnitCalls
    _module: nn.Module | None
    _optimizers: Sequence[Optimizer]
    _timeout: timedelta | None
    _recorded: Recorded | None

    @property
    def mesh(self) -> ProcessMesh:
        """See :class:`~smp_strategy.engine.engine.Engine`."""
        raise NotImplementedError

    @property
    def layout(self) -> Parallelizer:
        """See :class:`~smp_strategy.engine.engine.Engine`."""
        raise NotImplementedError

    @property
    def partition(self) -> Partition | None:
        """See :class:`~smp_strategy.engine.engine.Engine`."""
        raise NotImplementedError

    @property
    def share(self) -> LocalModel:
        """See :class:`~smp_strategy.engine.engine.Engine`."""
        raise NotImplementedError

    @property
    def is_spread(self) -> bool:
        """See :class:`~smp_strategy.engine.engine.Engine`."""
        raise NotImplementedError

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step runs just now, and no hook of the user in it."""
        return self._calls.are_in_step

    @property
    def divides_updates(self) -> bool:
        """Whether a rank's optimizers see only some of the parameters, or pieces or parts of them."""
        mesh = self.mesh
        return (
            mesh.pp * mesh.tp > 1 or mesh.shard_group is not None or (self.config.shard_optimizer_state and mesh.dp > 1)
        )

    def stage_of(self, part: nn.Module) -> int | None:
        """The stage that runs ``part``; ``None`` where every stage does, or nothing is decided yet."""
        unit = None if self.partition is None else self._calls.unit_around(part)
        return None if unit is None or self.partition is None else self.partition.stage_of[unit]

    def explain(self) -> Explanation:
        """Why the units are where they are, and when each stage does what; known from the first step on."""
        if self.partition is None:
            raise SMPError("There is nothing to explain before the first step, which shows what the model does.")
        return Explanation(self.partition, self.layout.plans.of("train", self.partition.num_microbatches))

    def timeline(self) -> Timeline:
        """When each stage of this replica did what in the latest training step, beside its timetable.

        Collective over the replica, so that clocks can be compared: call it on all of its ranks, outside of steps.

        Raises:
            SMPError: no training step has run after a timetable yet, or a step runs just now.
        """
        self._calls.refuse_inside_of_step("A timeline")
        with self.views.put_aside():
            return gather(self._recorded, self.mesh, self._timeout)

    @property
    def traffic(self) -> OffloadStats:
        """What this rank's units have put into host memory, and taken back, in the latest step with backward."""
        return OffloadStats() if self._calls.runtime is None else self._calls.runtime.traffic

    def memory_report(self) -> MemoryReport:
        """What each rank holds, counted, beside what was predicted. Collective over all ranks, outside of steps."""
        self._calls.refuse_inside_of_step("A memory report")
        assert self._module is not None
        spread = self.share.sharded if self.is_spread else None
        with self.views.put_aside():
            halves = self._calls.halves
            copies = 0 if halves is None else halves.held_bytes
            return memory_report(self._module, self._optimizers, self.mesh, self.partition, spread, copies=copies)
