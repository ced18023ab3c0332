"""The parts of an engine, which its reports and its saved state share with it."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.same_inputs import NO_INPUTS, InputDigest, digest_of, looks_closely
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.engine.delayed_init import DelayedModule
from smp_strategy.engine.dry_run import DryRunInput
from smp_strategy.engine.figures.step_monitor import StepMonitor
from smp_strategy.engine.hooks.views import Views
from smp_strategy.engine.layout import Layout
from smp_strategy.engine.local_model import LocalModel
from smp_strategy.engine.loss_weighting import LossWeighting
from smp_strategy.engine.saving.pending_state import PendingState
from smp_strategy.engine.unit_calls import UnitCalls
from smp_strategy.errors import SMPError
from smp_strategy.pipeline.dist_calls.user_collectives import replicas_of
from smp_strategy.pipeline.isolation.carried_objects import CarriedObjects
from smp_strategy.pipeline.isolation.microbatch_state import MicrobatchState
from smp_strategy.pipeline.recording import Recorded
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.precision.mixed_precision import MixedPrecision

__all__ = ["EngineParts", "unset"]


def unset(config: SMPConfig) -> set[str]:
    """Names of the options that the library chooses because ``config`` does not."""
    return {name for name in ("microbatches", "pipeline_parallel_degree") if getattr(config, name) is None}


@final
class EngineParts:
    """Parts that come into being while a module is attached and partitioned.

    Attributes:
        module: the attached module; it stays known after it is detached.
        optimizers: of the module.
        keep_shared: modules whose attributes add up over microbatches.
        calls: intercepts calls of units.
        views: of the user's hooks.
        pending: state that waits for the first step.
        ledger: notes for comparison with all ranks.
        carried: objects that units change and get again; exists once there is a runtime.
        delayed: tensors on the meta device; exists once a module is attached.
        known_mesh, known_layout: ``None`` before a module is attached.
        local_model: this rank's part of the module; ``None`` before the first step.
        recorded: the latest training step that had a plan.
        monitor: is told of steps; ``None``: nobody asks for figures.
        gradients_are_seen: whether all replicas keep averaged gradients until the optimizer's step.
        begins_empty: whether each step begins without gradients, as far as is known.
        seed, num_steps, num_evaluations: where random streams are.
        num_samples: samples in the latest training step of this replica.
        has_counted: whether the first training step has been reported on.
        chosen: names of options that the user has left to the library: ``microbatches``, ``pipeline_parallel_degree``.
        has_described: whether the report of the first training step has been made.
        has_told_of_comparison: whether the user has been told of a loss that compares samples.
        loss_weighting: decides in which steps terms of the loss get weights.
    """

    carried: CarriedObjects
    delayed: DelayedModule

    def __init__(
        self, config: SMPConfig, device: torch.device, timeout: timedelta | None, report: Callable[[str], None]
    ) -> None:
        self.config = config
        self.device = device
        self.timeout = timeout
        self.report = report
        self.module: nn.Module | None = None
        self.optimizers: Sequence[Optimizer] = ()
        self.keep_shared: Sequence[nn.Module] = ()
        self.calls = UnitCalls(MixedPrecision.asked_for(config, device.type))
        self.views = Views()
        self.pending = PendingState()
        self.ledger = Ledger()
        self.known_mesh: ProcessMesh | None = None
        self.known_layout: Layout | None = None
        self.local_model: LocalModel | None = None
        self.recorded: Recorded | None = None
        self.monitor: StepMonitor | None = None
        self.gradients_are_seen = self.begins_empty = False
        self.seed = self.num_steps = self.num_evaluations = self.num_samples = 0
        self.has_counted = self.has_told_of_comparison = self.has_described = False
        self.chosen = unset(config)
        self._num_compared: Counter[str] = Counter()
        self.loss_weighting = LossWeighting(report, is_on=config.loss_weighting == "auto")

    def describe(self, text: str) -> None:
        """Report ``text`` about the layout, if the user wants to know everything (`smp_report=full`)."""
        if self.config.smp_report == "full":
            self.report(text)

    @property
    def mesh(self) -> ProcessMesh:
        """This rank's place among the ranks; exists once a module is attached."""
        if self.known_mesh is None:
            raise SMPError("The process mesh does not exist before a module is attached to the engine.")
        return self.known_mesh

    @property
    def layout(self) -> Layout:
        """Decisions on which rank gets which part; exists once a module is attached."""
        if self.known_layout is None:
            raise SMPError("The layout does not exist before a module is attached to the engine.")
        return self.known_layout

    @property
    def partition(self) -> Partition | None:
        """Which unit goes to which stage, once it is decided."""
        return None if self.known_layout is None else self.known_layout.partition

    @property
    def spread(self) -> LocalModel:
        """This rank's part of the module; exists from the first step on."""
        if self.local_model is None:
            raise SMPError("The module is spread over the ranks in the first step, which has not run yet.")
        return self.local_model

    @property
    def is_spread(self) -> bool:
        """Whether ranks lack values of the module."""
        return self.local_model is not None and self.local_model.whole_on != "all"

    def digest_of(self, kind: str, inputs: Any) -> InputDigest:
        """Digest of the inputs of a step of ``kind``, to be compared with those of this replica's other ranks."""
        if self.mesh.pp * self.mesh.tp == 1:
            return NO_INPUTS
        self._num_compared[kind] += 1
        # On an accelerator reading values waits for all work.
        return digest_of(inputs, reads_device=looks_closely(self._num_compared[kind]))

    def dry_run_input(self) -> DryRunInput:
        """Module and environment of dry runs."""
        num_stages = self.mesh.pp
        return DryRunInput(
            module=self.layout.module,
            units=self.layout.units,
            calls=self.calls,
            shape_inference=self.layout.shape_inference,
            device=self.device,
            optimizers=self.optimizers,
            num_microbatches=self.config.num_microbatches(num_stages) if num_stages > 1 else 1,
            replicas=replicas_of(self.mesh),
            begins_empty=self.begins_empty,
        )

    def glue(self) -> list[nn.Module]:
        """Modules above the units, without those in ``keep_shared``."""
        inside = {id(part) for unit in self.layout.units for part in unit.module.modules()}
        inside |= set(map(id, self.keep_shared))
        return [module for module in self.layout.module.modules() if id(module) not in inside]

    def private_state(self, glue: Sequence[nn.Module]) -> MicrobatchState:
        """State that keeps microbatches apart, in the modules :meth:`glue` and where hooks write to units."""
        units = [unit.module for unit in self.layout.units]
        return MicrobatchState(glue, units, lambda: self.calls.exposed_parts, self.calls.known_places)

    def reduce_gradients(self) -> None:
        """Sum up over stages, and average over replicas, gradients added since the last time. Collective."""
        if self.local_model is not None:
            with self.views.put_aside():
                self.local_model.reduction.reduce()
