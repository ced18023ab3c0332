"""Planning of layouts without ranks: traces a model once per split of layers, and searches the layouts of a cluster.

Costs of a microbatch of n samples are affine in n: kernels read weights once, and everything else per sample. So two
traces give those of any size: those of two samples and of three, because a dim of size one has kernels of its own
(transposed, it is still contiguous). Units that are built alike share one dry run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import nn
from torch.utils import _pytree as pytree

from smp_strategy.activations.policy import ActivationPolicies
from smp_strategy.activations.selection import choose
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.device import device_name, is_host
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine.commands.offline_planning import Survey, surveyed
from smp_strategy.engine.decide import step_program
from smp_strategy.engine.dry_run import DryRun, DryRunInput
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.device_model import modelled_work
from smp_strategy.model.trace.events import Trace
from smp_strategy.model.units import Unit
from smp_strategy.planning.activation_budget.allocate import ActivationPlan
from smp_strategy.planning.costs import Costs
from smp_strategy.planning.layouts.cluster import DEVICES, Cluster, JobLayout, device_named, divisors, layouts_on
from smp_strategy.planning.layouts.estimate import (
    Estimate,
    LayoutCosts,
    LayoutPlan,
    MicrobatchCosts,
    fastest_layouts,
    planned,
    rough,
)
from smp_strategy.planning.planner import PlanningInput
from smp_strategy.tensor_parallel.layers.embedding import HiddenParallelEmbedding, VocabParallelEmbedding
from smp_strategy.tensor_parallel.layers.linear import RowParallelLinear
from smp_strategy.tensor_parallel.plan.observed_pairs import ObservedLayers

__all__ = ["LayoutPlanner", "estimates_on_ranks"]

# Part of the device's memory that the plan leaves to the allocator, the context and kernels' workspaces.
RESERVED = 0.08
MOST_TENSOR_RANKS = 16
# Layers whose forward ends with an all-reduce of their result.
_SUMMED = (RowParallelLinear, VocabParallelEmbedding, HiddenParallelEmbedding)


@final
@dataclass(kw_only=True)
class LayoutPlanner:
    """A model whose layouts are planned, with the costs that are known so far.

    Args:
        module: The whole module, on the CPU or on the meta device.
        step: Training step on a microbatch, which returns the loss.
        batch_of: A microbatch of n samples; tensors on the meta device count as zeros.
        cluster: Devices and links.
        options: Options of all layouts, as for ``SMPStrategy``: precision, patterns of units.
        memory_limit: Bytes of a rank; ``None``: those of the device, less 8 %.
    """

    module: nn.Module
    step: Callable[[Any], Any]
    batch_of: Callable[[int], Any]
    cluster: Cluster
    options: Mapping[str, Any] = field(default_factory=dict)
    memory_limit: int | None = None
    _programs: dict[tuple[int, int, bool], PlanningInput] = field(default_factory=dict)
    """By ranks of a layer and of a shard group, and whether there are several stages; for one sample."""
    _split: dict[int, "_SplitModel"] = field(default_factory=dict)
    _costs: dict[tuple[int, int, bool, int], LayoutCosts] = field(default_factory=dict)
    _observed: ObservedLayers | None = None

    def search(self, global_batch: int, *, finalists: int = 8) -> LayoutPlan:
        """The fastest layouts for ``global_batch`` samples a step.

        Raises:
            ConfigError: No layout has equal microbatches.
            UnsupportedError: The step reads values, and the module has none.
        """
        num_units = len(self._costs_of(JobLayout(1, 1, 1, 1, 1, 1)).program.parameters)
        degrees = divisors(self.cluster.devices_per_node)
        splits = [tp for tp in degrees if tp == 1 or (tp <= MOST_TENSOR_RANKS and self._splits(tp))]
        layouts = layouts_on(self.cluster, global_batch, num_units=num_units, splits=splits)
        return self._plan(fastest_layouts(layouts, self._costs_of, self.cluster, self._limit, finalists=finalists))

    def estimate(self, layout: JobLayout) -> LayoutPlan:
        """The prediction for one layout.

        Raises:
            ConfigError: It does not fit the devices' memory.
        """
        return self._plan([planned(self._costs_of(layout), layout, self.cluster, self._limit)])

    @property
    def _limit(self) -> int:
        return self.memory_limit or int((1 - RESERVED) * self.cluster.device.memory_bytes)

    def _plan(self, estimates: Sequence[Estimate]) -> LayoutPlan:
        events = self._surveyed(1).one.events
        return LayoutPlan(
            estimates=estimates,
            cluster=self.cluster,
            num_parameters=sum(parameter.numel() for parameter in self.module.parameters()),
            flops_per_sample=sum(effort.flops for event in events for effort in event.effort),
        )

    def _config(self, tp: int, dp_shard: int, num_stages: int) -> SMPConfig:
        degrees = {
            "tensor_parallel_degree": tp,
            "sharded_data_parallel_degree": dp_shard,
            "pipeline_parallel_degree": num_stages,
        }
        return SMPConfig.from_options(**{**self.options, **degrees})

    def _splits(self, tp: int) -> bool:
        """Whether layers can be split over ``tp`` ranks."""
        try:
            return bool(self._surveyed(tp).summed)
        except ConfigError:
            return False

    def _costs_of(self, layout: JobLayout) -> LayoutCosts:
        split = self._surveyed(layout.tp)
        key = (layout.tp, layout.dp_shard, layout.pp > 1, layout.samples)
        if key not in self._costs:
            self._costs[key] = LayoutCosts(
                program=self._programs[layout.tp, layout.dp_shard, layout.pp > 1],
                microbatch=split.microbatch(layout.samples),
                itemsize=split.itemsize,
            )
        return self._costs[key]

    def _surveyed(self, tp: int) -> "_SplitModel":
        """Traces with layers split over ``tp`` ranks, and what ranks hold in any shard group."""
        if tp not in self._split:
            larger = []
            for samples in (2, 3):
                with self._survey(tp, samples) as survey:
                    larger.append(_traced(survey))
                    self._observed = self._observed or survey.observed
            with self._survey(tp, 1) as survey:
                one = _traced(survey)
                inputs = survey.inputs
                if any(one.path != more.path for more in larger):
                    raise ConfigError(
                        "The step calls other units, or in another order, for several samples than for one, so its "
                        "costs for more of them are unknown. Use `plan_partition` with a microbatch of your size."
                    )
                dtypes = (
                    {} if inputs.calls.mixed_precision is None else inputs.calls.mixed_precision.dtypes_in(self.module)
                )
                first = next(iter(dtypes.values()), next(self.module.parameters()).dtype)
                recomputing = replace(self._config(tp, 1, 1), activation_checkpointing="all")
                self._split[tp] = _SplitModel(
                    one=one,
                    several=(larger[0], larger[1]),
                    summed=_summed_layers(inputs.units) if tp > 1 else {},
                    relief=survey.costs.relief or ActivationPlan(machine=survey.costs.machine),
                    recomputing=choose(recomputing, self.module, inputs.units).units,
                    itemsize=first.itemsize,
                )
                for dp_shard in divisors(self.cluster.num_devices // tp):
                    for stages in (1, 2):
                        shape = MeshShape(pp=stages, dp=dp_shard, dp_shard=dp_shard, tp=tp)
                        config = self._config(tp, dp_shard, stages)
                        program = step_program(config, inputs, survey.found, survey.costs, shape, (None,) * stages)
                        self._programs[tp, dp_shard, stages > 1] = program
        return self._split[tp]

    def _survey(self, tp: int, samples: int) -> AbstractContextManager[Survey]:
        return surveyed(
            self._config(tp, 1, 1),
            self.module,
            self.step,
            self.batch_of(samples),
            shape=MeshShape(pp=1, dp=1, tp=tp),
            machine=self.cluster.device.machine,
            shares=True,
            before=self._observed,
        )


@final
@dataclass(frozen=True, kw_only=True)
class _SplitModel:
    """The model with its layers split over some ranks."""

    one: Trace
    """Trace of one sample."""
    several: tuple[Trace, Trace]
    """Traces of two samples and of three."""
    summed: Mapping[str, int]
    """Number of all-reduces in the forward of each unit."""
    relief: ActivationPlan
    recomputing: ActivationPolicies
    itemsize: int
    _sizes: dict[int, MicrobatchCosts] = field(default_factory=dict)

    def microbatch(self, samples: int) -> MicrobatchCosts:
        if samples not in self._sizes:
            two, three = (tuple(trace.events) for trace in self.several)
            trace = self.one if samples == 1 else replace(self.one, events=_affine(two, three, samples))
            calls = [event for event in trace.events if event.kind == "unit"]
            outputs = {event.name: sum(value.nbytes for value in event.outputs[:1]) for event in calls}
            self._sizes[samples] = MicrobatchCosts(
                trace=trace,
                work=modelled_work(trace.events, self.relief.machine),
                relief=self.relief,
                recomputing=self.recomputing,
                split_bytes={name: number * outputs.get(name, 0) for name, number in self.summed.items()},
            )
        return self._sizes[samples]


def estimates_on_ranks(
    config: SMPConfig, inputs: DryRunInput, found: DryRun, costs: Costs, now: JobLayout, *, node_size: int, limit: int
) -> list[Estimate]:
    """Rough estimates for the ranks of a run: of its layout, then of each with fewer stages and more replicas.

    A step has the same samples in microbatches of the same size, so that one trace is enough.

    Args:
        now: Layout of the run, without split layers and shards.
        limit: Bytes of a rank.

    Returns:
        Nothing if the device is unknown.
    """
    device = DEVICES["cpu"] if is_host(inputs.device) else device_named(device_name(inputs.device))
    if device is None:
        return []
    cluster = Cluster(nodes=now.world_size // node_size, devices_per_node=node_size, device=device)
    layouts = [now]
    for pp in (degree for degree in divisors(now.world_size) if degree < now.pp):
        dp = now.world_size // pp
        microbatches, left = divmod(now.microbatches * now.dp, dp)
        layouts += [
            now._replace(pp=pp, dp_shard=dp // each, dp_replicate=each, microbatches=microbatches)
            for each in (dp, 1)
            if microbatches and not left
        ]
    estimates = []
    for layout in layouts:
        options = replace(config, pipeline_parallel_degree=layout.pp, sharded_data_parallel_degree=layout.dp_shard)
        shape = MeshShape(pp=layout.pp, dp=layout.dp, dp_shard=layout.dp_shard)
        program = step_program(options, inputs, found, costs, shape, (limit,) * layout.pp)
        microbatch = MicrobatchCosts(
            trace=program.trace,
            work=program.work,
            relief=program.relief,
            recomputing=program.relief.fixed,
            split_bytes={},
        )
        itemsize = next(inputs.module.parameters()).element_size()
        layout_costs = LayoutCosts(program=program, microbatch=microbatch, itemsize=itemsize)
        estimates.append(rough(layout_costs, layout, cluster, limit))
    return estimates


def _traced(survey: Survey) -> Trace:
    if survey.found.trace is None:
        raise ConfigError("The step reads values, which a model without weights has not, so it cannot be planned.")
    return survey.found.trace


def _summed_layers(units: Sequence[Unit]) -> dict[str, int]:
    counts = {unit.name: sum(isinstance(part, _SUMMED) for part in unit.module.modules()) for unit in units}
    return {name: number for name, number in counts.items() if number}


def _affine(two: Any, three: Any, number: int) -> Any:
    """``two`` with all integers that differ in ``three`` continued to ``number``."""

    def continued(two: Any, three: Any) -> Any:
        return two + (number - 2) * (three - two) if type(two) is int else two

    return pytree.tree_map(continued, two, three)
