"""Reports of an engine on demand: explanation of the partition, timeline of a step, memory of all ranks."""

from typing import final

from torch import nn

from smp_strategy.activations.policy import OffloadStats
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.errors import SMPError
from smp_strategy.reports.explain.explanation import Explanation
from smp_strategy.reports.memory_report import MemoryReport, memory_report
from smp_strategy.reports.timeline.clocks import gather
from smp_strategy.reports.timeline.timeline import Timeline

__all__ = ["Inspection"]


@final
class Inspection:
    """Reports of an engine.

    Args:
        parts: of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step is running, outside of hooks of the user."""
        return self._parts.calls.are_in_step

    @property
    def divides_updates(self) -> bool:
        """Whether the optimizers of a rank see only some parameters, or shards or parts of them."""
        mesh = self._parts.mesh
        return (
            mesh.pp * mesh.tp > 1
            or mesh.shard_group is not None
            or (self._parts.config.shard_optimizer_state and mesh.dp > 1)
        )

    def stage_of(self, part: nn.Module) -> int | None:
        """Stage that runs ``part``; ``None`` if every stage does, or if nothing is decided yet."""
        unit = None if self._parts.partition is None else self._parts.calls.unit_around(part)
        return None if unit is None or self._parts.partition is None else self._parts.partition.stage_of[unit]

    def explain(self) -> Explanation:
        """Explanation of the partition and the schedule; known from the first step on."""
        if self._parts.partition is None:
            raise SMPError("There is nothing to explain before the first step, which shows what the model does.")
        return Explanation(
            self._parts.partition, self._parts.layout.plans.of("train", self._parts.partition.num_microbatches)
        )

    def timeline(self) -> Timeline:
        """Timeline of the stages of this replica in the latest training step, beside its timetable.

        Collective over the replica, so that clocks can be compared: call it on all of its ranks, outside of steps.

        Raises:
            SMPError: no training step has run after a timetable yet, or a step runs just now.
        """
        self._parts.calls.refuse_inside_of_step("A timeline")
        with self._parts.views.put_aside():
            return gather(self._parts.recorded, self._parts.mesh, self._parts.timeout)

    @property
    def traffic(self) -> OffloadStats:
        """Offload statistics of this rank in the latest step with backward."""
        runtime = self._parts.calls.runtime
        return OffloadStats() if runtime is None else runtime.stage.activations.offload.traffic

    def memory_report(self) -> MemoryReport:
        """Memory of each rank, counted and predicted. Collective over all ranks, outside of steps."""
        self._parts.calls.refuse_inside_of_step("A memory report")
        assert self._parts.module is not None
        spread = self._parts.spread.sharded if self._parts.is_spread else None
        with self._parts.views.put_aside():
            mixed_precision = self._parts.calls.mixed_precision
            copies = 0 if mixed_precision is None else mixed_precision.held_bytes
            return memory_report(
                self._parts.module,
                self._parts.optimizers,
                self._parts.mesh,
                self._parts.partition,
                spread,
                copies=copies,
            )
