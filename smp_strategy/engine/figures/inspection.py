"""Reports of an engine on demand: explanation of the partition, timeline of a step, memory of all ranks."""

from typing import TypeGuard, final

import torch
from torch import nn

from smp_strategy.activations.policy import OffloadStats
from smp_strategy.data_parallel.grad_norm import UnscaleResult
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.device import device_name, is_host, wait_for_all
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.figures.step_monitor import StepMonitor
from smp_strategy.errors import SMPError
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.planning.layouts.cluster import device_named
from smp_strategy.planning.memory.counting import count
from smp_strategy.planning.memory.sharded import RankMemory
from smp_strategy.reports.explain.explanation import Explanation
from smp_strategy.reports.memory_report import MemoryReport, memory_report
from smp_strategy.reports.run_figures import combine
from smp_strategy.reports.timeline.clocks import gather
from smp_strategy.reports.timeline.timeline import Timeline

__all__ = ["Inspection", "is_placed"]


def is_placed(value: object) -> TypeGuard[PlacedTensor]:
    """Whether ``value`` is a tensor of a step, whose values may be on another stage."""
    return isinstance(value, PlacedTensor)


@final
class Inspection:
    """Reports of an engine."""

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
        return mesh.spreads_model or (self._parts.config.shard_optimizer_state and mesh.dp > 1)

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
    def monitor(self) -> StepMonitor | None:
        """Monitor of steps; set it before a step, on all ranks alike."""
        return self._parts.monitor

    @monitor.setter
    def monitor(self, monitor: StepMonitor | None) -> None:
        self._parts.monitor = monitor

    @property
    def num_steps(self) -> int:
        """Number of training steps so far."""
        return self._parts.num_steps

    def checked(self, found: UnscaleResult, *, is_scaled: bool) -> UnscaleResult:
        """``found``, a finding of all ranks about gradients, when the monitor has seen it; it may raise."""
        partition = self._parts.partition
        if self._parts.monitor is not None and partition is not None:
            self._parts.monitor.check(found, partition.stage_of, is_scaled=is_scaled)
        return found

    def figures(self, loss_scale: float | None = None) -> dict[str, float]:
        """Figures of the monitor since the last call, the same on all ranks; none without a step. Collective."""
        monitor, device, mesh = self._parts.monitor, self._parts.device, self._parts.mesh
        if monitor is None or self._parts.partition is None:
            return {}
        wait_for_all(device)
        stage = self._parts.partition.stages[mesh.stage]
        if is_host(device):
            memory, predicted = self._held().total, stage.held.total
        else:
            memory, predicted = torch.accelerator.max_memory_allocated(device), stage.memory_bytes
        mine = monitor.take(
            gathered=self._parts.spread.holdings.sharded.seconds_waited,
            counts=mesh.stage == mesh.pp - 1 and mesh.tp_rank == 0,
            memory=memory,
            predicted=predicted,
        )
        known = device_named(device_name(device))
        peak = None if known is None else known.peak_flops
        found = combine(collectives.gather_objects(mine, "figures of the run"), peak)
        if found and loss_scale is not None:
            found["smp/loss_scale"] = loss_scale
        if found and monitor.searches:
            found["smp/nonfinite_updates"] = float(monitor.num_nonfinite)
        return found

    @property
    def traffic(self) -> OffloadStats:
        """Offload statistics of this rank in the latest step with backward."""
        runtime = self._parts.calls.runtime
        return OffloadStats() if runtime is None else runtime.stage.activations.offload.traffic

    def memory_report(self) -> MemoryReport:
        """Memory of each rank, counted and predicted. Collective over all ranks, outside of steps."""
        self._parts.calls.refuse_inside_of_step("A memory report")
        return memory_report(self._held(), self._parts.partition)

    def _held(self) -> RankMemory:
        """Memory of this rank between steps, counted."""
        assert self._parts.module is not None
        spread = self._parts.spread.holdings.sharded if self._parts.is_spread else None
        mixed_precision = self._parts.calls.mixed_precision
        copies = 0 if mixed_precision is None else mixed_precision.held_bytes
        with self._parts.views.put_aside():
            return count(self._parts.module, self._parts.optimizers, self._parts.mesh, spread, copies=copies)
