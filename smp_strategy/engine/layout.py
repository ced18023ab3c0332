"""Layout of a module over the ranks: what the first step decides, and later runs of the same engine keep.

It holds data only. :func:`smp_strategy.engine.parallelize.parallelize` fills it in, in the first step. A later run
finds it filled in, and gets the partition that the state of the optimizers is made for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, final

import torch
from torch import Tensor, nn

from smp_strategy.activations.policy import ActivationPolicies
from smp_strategy.activations.selection import CheckpointSelection, choose
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.engine.given_partition import GivenPartition, num_parameters_of
from smp_strategy.engine.plan_cache import PlanCache
from smp_strategy.model.annotations import placed_modules
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.units import Unit
from smp_strategy.planning.costs import Costs
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.tensor_parallel.plan.plan import SplitReport
from smp_strategy.tensor_parallel.split_module import SplitModule

__all__ = ["Layout"]


@final
@dataclass(kw_only=True, eq=False)
class Layout:
    """Decisions on a module, and what they are made from."""

    module: nn.Module
    """Module; full on every rank until the first step frees the values of other ranks."""
    units: Sequence[Unit]
    placed: Mapping[str, int]
    """Stages of modules that the user has annotated."""
    given: GivenPartition | None
    """Stages of units that the user has decided; ``None``: the library chooses."""
    recomputed: CheckpointSelection
    """Activation policies that the options set, for units and for modules inside them."""
    num_parameters: Mapping[str, int]
    """Number of parameters of each unit before layers are split."""
    shape_inference: ShapeInference
    """Predictions of results, which all dry runs and steps share."""
    group: TensorGroup
    activation_policies: ActivationPolicies
    """Activation policies of units; from the first step on, those of the partition."""
    costs: Costs
    """Costs of calls: modelled, or measured once the partition is decided."""
    partition: Partition | None = None
    """Stage of each unit; ``None`` until it is decided."""
    split: SplitModule = field(default_factory=SplitModule.none)
    used_by_glue: tuple[Tensor, ...] = ()
    """Parameters and tables of units that code above the units computes with."""
    known_plans: PlanCache | None = None
    """Plan cache; ``None`` until the partition is decided."""

    @classmethod
    def undecided(
        cls,
        config: SMPConfig,
        module: nn.Module,
        units: Sequence[Unit],
        mesh: ProcessMesh,
        device: torch.device,
        given: GivenPartition | None,
    ) -> Self:
        """Layout before the first step.

        Raises:
            ConfigError: a pattern of `activation_checkpointing` fits no module.
        """
        num_parameters = num_parameters_of(units)
        recomputed = choose(config, module, units)
        return cls(
            module=module,
            units=units,
            placed=placed_modules(module),
            given=given,
            recomputed=recomputed,
            num_parameters=num_parameters,
            shape_inference=ShapeInference(device),
            group=TensorGroup(mesh.tp_group),
            activation_policies=recomputed.units,
            costs=Costs.modelled(device),
        )

    @property
    def plans(self) -> PlanCache:
        """Plan cache; exists once the partition is decided."""
        assert self.known_plans is not None
        return self.known_plans

    @property
    def split_report(self) -> SplitReport | None:
        """Report on each layer; ``None`` if none are split, or before the first step."""
        return self.split.report if self.split.parts.is_split else None
