"""Estimate of a layout on a cluster: seconds of a step and bytes of a rank, by category.

The step of a replica is the planner's: units on stages, simulated under a schedule, with messages between stages. This
module adds what ranks of different stages or replicas do together, as rings (:meth:`Cluster.ring`):

==================  ===================================================================================================
split layers        an all-reduce of a layer's result in forward and one in backward, for each row-parallel layer
                    (Megatron-LM, arXiv:1909.08053); part of the unit's work
sums of gradients   an all-reduce among replicas, or a reduce-scatter in the shard group and an all-reduce of shards
                    (MiCS, arXiv:2205.00119)
gathers             an all-gather of each unit's parameters: with several stages once per step, otherwise in forward and
                    in backward of every microbatch
additions           gradients of a microbatch are added to those before: two reads and a write of each element
==================  ===================================================================================================

With a single stage, gathers and reduce-scatters overlap with the computation of other units, and sums with the backward
of the last microbatch; with several, they come before and after the passes of the step.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple, Self, final

from smp_strategy.activations.policy import ActivationPolicies
from smp_strategy.config.config import SMPConfig
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.work import Link, Work
from smp_strategy.planning.activation_budget.allocate import ActivationPlan
from smp_strategy.planning.layouts.cluster import Cluster, JobLayout
from smp_strategy.planning.memory.sharded import with_turns
from smp_strategy.planning.partition.partition import MemoryByCategory, Partition, StageLoad
from smp_strategy.planning.partition.problem import HeldBytes
from smp_strategy.planning.planner import PlanningInput, best_partition
from smp_strategy.planning.schedule.policies import Policy

__all__ = [
    "Estimate",
    "LayoutCosts",
    "MicrobatchCosts",
    "planned",
    "rough",
    "LayoutPlan",
    "fastest_layouts",
    "why_slower",
]


GRADIENT_ITEMSIZE = 4
# Reads and writes of parameters, gradients and moments by an optimizer such as Adam, per byte of them.
OPTIMIZER_PASSES = 1.75


class StepSeconds(NamedTuple):
    """Seconds of a step by category; the sum is its time."""

    computation: float
    """Passes of the busiest stage, without what follows."""
    recomputation: float
    split_layers: float
    """Messages of layers that are split over ranks."""
    idle: float
    """Waiting for other stages, and for messages between stages."""
    gathers: float
    """Gathers of sharded parameters that no computation hides."""
    gradients: float
    """Additions over microbatches, and sums over ranks that no computation hides."""
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


@final
@dataclass(frozen=True, kw_only=True)
class MicrobatchCosts:
    """A microbatch of one size, for one split of layers."""

    trace: Trace
    work: Mapping[int, Work]
    """Work of each event, by position, without recomputation and without messages."""
    relief: ActivationPlan
    recomputing: ActivationPolicies
    """Policies of the units under `activation_checkpointing=all`."""
    split_bytes: Mapping[str, int]
    """Bytes that all-reduces of split layers sum in forward, by unit."""

    @cached_property
    def kept(self) -> "_Totals":
        """Sums over the units, which keep their activations."""
        return _Totals.of(self.trace, self.work, sum(map(sum, self.work.values())))

    @cached_property
    def recomputed(self) -> "_Totals":
        """Sums over the units, which compute their activations again."""
        trace, work = self.relief.treated(self.trace, self.work, self.recomputing, {})
        return _Totals.of(trace, work, self.kept.plain)


@final
@dataclass(frozen=True, kw_only=True)
class LayoutCosts:
    """Costs of a model for one split of layers, one shard group and one size of microbatch."""

    program: PlanningInput
    """What ranks hold; its trace may be of another size."""
    microbatch: MicrobatchCosts
    itemsize: int
    """Bytes of an element in which units compute."""

    @cached_property
    def trace(self) -> Trace:
        """Trace of the microbatch; working memory is beside the gathered units of shards."""
        return with_turns(self.microbatch.trace, self.program.turns)

    @cached_property
    def working_bytes(self) -> int:
        """Working memory of a call, at most."""
        return max((event.kept.working_bytes for event in self.trace.events), default=0)

    @cached_property
    def held(self) -> tuple[HeldBytes, HeldBytes]:
        """Bytes of a rank that had all units, and those that every stage holds."""
        everywhere = self.program.everywhere
        ways = {key: held for mine in self.program.parameters.values() for key, held in mine.items()}
        units = HeldBytes.sum_of(held for key, held in ways.items() if key not in everywhere)
        return units, HeldBytes.sum_of(everywhere.values())

    @cached_property
    def elements(self) -> int:
        """Trained elements of all units, before they are sharded."""
        whole = self.program.whole
        units = (
            whole.values() if whole else map(HeldBytes.sum_of, (m.values() for m in self.program.parameters.values()))
        )
        return sum(held.gradient for held in units) // GRADIENT_ITEMSIZE


class _Totals(NamedTuple):
    """Sums over the units for a microbatch."""

    plain: float
    """Seconds without recomputation."""
    seconds: float
    longest: float
    """Seconds of the longest unit."""
    backward: float
    saved_bytes: int
    again_bytes: int
    """Most bytes that the recomputation of a unit adds."""
    cut_bytes: int
    """Bytes of the result of an ordinary unit: the median."""

    @classmethod
    def of(cls, trace: Trace, work: Mapping[int, Work], plain: float) -> Self:
        each = list(map(sum, work.values()))
        return cls(
            plain,
            sum(each),
            max(each, default=0.0),
            sum(mine.backward for mine in work.values()),
            sum(event.saved_bytes for event in trace.events),
            max((event.again_bytes for event in trace.events), default=0),
            int(median(value.nbytes for event in trace.events for value in event.outputs[:1] if event.kind == "unit")),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A layout with its predicted step."""

    layout: JobLayout
    seconds: StepSeconds
    memory: MemoryByCategory
    memory_limit: int
    link_bytes: Mapping[str, int]
    """Bytes that a rank of the busiest stage sends in a step, by purpose."""
    partition: Partition | None = None
    """Stages with their loads; ``None`` for a rough estimate."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank stays within the device's memory."""
        return self.memory.total <= self.memory_limit

    @property
    def samples_per_second(self) -> float:
        return self.layout.global_batch / self.seconds.total


def rough(costs: LayoutCosts, layout: JobLayout, cluster: Cluster, memory_limit: int) -> Estimate:
    """Estimate for a first choice: work and memory spread evenly over the stages, messages of an ordinary unit."""
    totals = costs.microbatch.recomputed if layout.recomputes else costs.microbatch.kept
    stages, microbatches = layout.pp, layout.microbatches
    busiest = max((totals.seconds + _split_seconds(costs, layout, cluster)) / stages, totals.longest)
    saved = totals.saved_bytes * min(stages, microbatches) // stages + totals.again_bytes
    units, everywhere = costs.held
    held = HeldBytes(*(mine + theirs // stages for mine, theirs in zip(everywhere, units, strict=True)))
    message = 0.0 if stages == 1 else _stage_link(layout, cluster).seconds(totals.cut_bytes)
    # Messages fill and drain the pipeline like passes, and a link has no time for more than one of them.
    step = (microbatches - 1) * max(busiest, message) + stages * busiest + 2 * (stages - 1) * message
    memory = StageLoad(0.0, held, saved, working_bytes=costs.working_bytes).fullest
    timed = (step, microbatches * busiest, memory, held.states)
    return _estimate(costs, layout, cluster, memory_limit, timed, costs.elements // stages)


def planned(costs: LayoutCosts, layout: JobLayout, cluster: Cluster, memory_limit: int) -> Estimate:
    """Estimate by the partition and the schedule that the planner finds, 1F1B with one chunk or two.

    Raises:
        ConfigError: No partition fits the limit.
    """
    # Gradients of shards have memory of their own.
    is_empty = layout.dp_shard == 1
    limits = (memory_limit,) * layout.pp
    program = replace(_program_on(costs, layout, cluster), memory_limits=limits, begins_empty=is_empty)
    config = SMPConfig.from_options(**layout.options)
    chunks = [1, 2] if layout.pp > 1 and 2 * layout.pp <= len(program.parameters) else [1]
    policies = [Policy("1f1b", number) for number in chunks]
    partition = best_partition(config, program, layout.pp, policies=policies)
    busiest = max(stage.seconds for stage in partition.stages)
    whole = max(
        sum(unit.held.gradient for unit in partition.units if unit.stage == stage) for stage in range(layout.pp)
    )
    stage = max(partition.stages, key=lambda stage: stage.memory_bytes)
    timed = (partition.step_seconds, busiest, stage.fullest, stage.held.states)
    found = _estimate(costs, layout, cluster, memory_limit, timed, whole // GRADIENT_ITEMSIZE)
    return replace(found, partition=partition)


def _program_on(costs: LayoutCosts, layout: JobLayout, cluster: Cluster) -> PlanningInput:
    """The program under the layout: links, messages of split layers as work, recomputation."""
    microbatch = costs.microbatch
    relief = replace(microbatch.relief, fixed=microbatch.recomputing if layout.recomputes else {})
    link = _stage_link(layout, cluster)
    work = dict(microbatch.work)
    for position, event in enumerate(microbatch.trace.events):
        nbytes = microbatch.split_bytes.get(event.name, 0) if event.kind == "unit" else 0
        if nbytes:
            seconds, mine = 2 * cluster.ring(nbytes, layout.tp, per_node=layout.tp), work[position]
            work[position] = mine._replace(forward=mine.forward + seconds, input_gradient=mine.input_gradient + seconds)
    return replace(costs.program, trace=costs.trace, work=work, link=link, relief=relief)


def _estimate(
    costs: LayoutCosts,
    layout: JobLayout,
    cluster: Cluster,
    memory_limit: int,
    timed: tuple[float, float, MemoryByCategory, int],
    elements: int,
) -> Estimate:
    """Estimate from a simulated step.

    Args:
        costs, layout, cluster, memory_limit: As given.
        timed: Seconds of the step, work of its busiest stage, bytes of the fullest rank, and of its states.
        elements: Trained elements of a stage, before they are sharded.
    """
    step, busiest, memory, states = timed
    totals = costs.microbatch.recomputed if layout.recomputes else costs.microbatch.kept
    split = _split_seconds(costs, layout, cluster)
    passes = totals.seconds + split
    share = busiest / passes if passes else 0.0
    gathers, gradients, sent = _data_parallel(costs, layout, cluster, elements)
    if layout.pp == 1 and cluster.device.sends_beside:
        # The first unit's gather, and the last unit's sum, have nothing beside them.
        alone, beside = 1 / max(1, len(costs.program.parameters)), passes * layout.microbatches
        gathers = max(gathers * alone, gathers - beside)
        gradients = max(gradients * alone, gradients - (beside if layout.dp_shard > 1 else totals.backward))
    added = (layout.microbatches - 1) * elements * GRADIENT_ITEMSIZE
    gradients += 3 * (added if layout.pp > 1 else added / layout.dp_shard) / cluster.device.machine.bytes_per_second
    if layout.tp > 1:
        nbytes = sum(costs.microbatch.split_bytes.values())
        sent["split layers"] = 2 * 2 * nbytes * layout.microbatches // layout.pp
    seconds = StepSeconds(
        computation=totals.plain * share,
        recomputation=(totals.seconds - totals.plain) * share,
        split_layers=split * share,
        idle=max(0.0, step - busiest),
        gathers=gathers,
        gradients=gradients,
        optimizer=OPTIMIZER_PASSES * states / cluster.device.machine.bytes_per_second,
    )
    return Estimate(layout=layout, seconds=seconds, memory=memory, memory_limit=memory_limit, link_bytes=sent)


def _data_parallel(
    costs: LayoutCosts, layout: JobLayout, cluster: Cluster, elements: int
) -> tuple[float, float, dict[str, int]]:
    """Seconds of gathers and of sums of gradients in a step, and bytes that a rank sends for them."""
    shards, near = layout.dp_shard, layout.ranks_per_node(cluster.devices_per_node)
    whole, gradients = elements * costs.itemsize, elements * GRADIENT_ITEMSIZE
    times = 0 if shards == 1 else 1 if layout.pp > 1 else 2 * layout.microbatches
    passes = 1 if layout.pp > 1 else layout.microbatches
    gathering = times * cluster.ring(whole, shards, per_node=near.dp_shard)
    summing = passes * cluster.ring(gradients, shards, per_node=near.dp_shard)
    summing += 2 * cluster.ring(gradients / shards, layout.dp_replicate, per_node=near.dp_replicate)
    sent = {
        "gathers": times * whole * (shards - 1) // shards,
        "gradients": passes * gradients * (shards - 1) // shards
        + 2 * gradients // shards * (layout.dp_replicate - 1) // layout.dp_replicate,
    }
    return gathering, summing, {purpose: nbytes for purpose, nbytes in sent.items() if nbytes}


def _stage_link(layout: JobLayout, cluster: Cluster) -> Link:
    """Connection of neighbouring stages; between nodes if some of them are on different ones."""
    return cluster.link(is_inside=layout.ranks_per_node(cluster.devices_per_node).pp == layout.pp)


def _split_seconds(costs: LayoutCosts, layout: JobLayout, cluster: Cluster) -> float:
    """Seconds of the all-reduces of split layers in forward and backward of a microbatch."""
    if layout.tp == 1:
        return 0.0
    return sum(
        # Two rings in each pass: a reduce-scatter and an all-gather.
        4 * number * cluster.ring(nbytes, layout.tp, per_node=layout.tp)
        for nbytes, number in Counter(costs.microbatch.split_bytes.values()).items()
    )


# --- search ----------------------------------------------------------------------------------------------------------
# Search of the fastest layouts: a rough estimate of all, and the planner's for the best of them.


# Rough estimates know nothing of uneven units, and are mostly less than this factor off.
LIKELY_ERROR = 1.3


@final
@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """The fastest layouts of a model on a cluster."""

    estimates: Sequence[Estimate]
    """The best one first."""
    cluster: Cluster
    num_parameters: int
    flops_per_sample: float
    """Floating-point operations of forward and backward, without recomputation."""

    def mfu(self, estimate: Estimate) -> float:
        """Model FLOPs utilization (PaLM, arXiv:2204.02311): FLOP/s of the model over the peak of all devices."""
        peak = self.cluster.device.peak_flops * estimate.layout.world_size
        return self.flops_per_sample * estimate.samples_per_second / peak


def fastest_layouts(
    layouts: Iterable[JobLayout],
    costs_of: Callable[[JobLayout], LayoutCosts],
    cluster: Cluster,
    memory_limit: int,
    *,
    finalists: int = 8,
) -> list[Estimate]:
    """The fastest layouts that fit, the best one first.

    Args:
        layouts: Layouts to choose from.
        costs_of: Costs of the model under a layout.
        cluster: Devices and links.
        memory_limit: Bytes of a rank.
        finalists: Number of layouts that are planned in full.

    Returns:
        At most ``finalists`` estimates. If nothing fits: one, that of the layout that needs least memory.
    """
    found = [rough(costs_of(layout), layout, cluster, memory_limit) for layout in layouts]
    if not found:
        raise ConfigError(
            "No layout fills the devices with equal microbatches. Take a global batch with more divisors."
        )
    # Recomputation of what fits without it only costs time; the planner decides about what fits barely.
    found.sort(key=lambda estimate: (estimate.seconds.total, estimate.memory.total))
    likely = [estimate for estimate in found if estimate.fits]
    best: list[Estimate] = []
    for estimate in likely:
        if len(best) == finalists or (best and estimate.seconds.total > LIKELY_ERROR * best[0].seconds.total):
            break
        try:
            best.append(planned(costs_of(estimate.layout), estimate.layout, cluster, memory_limit))
        except ConfigError:  # its fullest stage does not fit
            continue
        best.sort(key=lambda each: each.seconds.total)
    return best or [min(found, key=lambda estimate: estimate.memory.total)]


def why_slower(one: Estimate, best: Estimate) -> str:
    """The category in which ``one`` loses most against ``best``, in words; empty if it is not slower."""
    names = {
        "computation": "smaller or less even pieces of work",
        "recomputation": "computes activations again",
        "split_layers": "messages of split layers",
        "idle": "stages wait for each other",
        "gathers": "gathers of parameters",
        "gradients": "sums of gradients",
        "optimizer": "optimizer with less sharing",
    }
    more = {name: mine - theirs for name, mine, theirs in zip(names, one.seconds, best.seconds, strict=True)}
    most = max(more, key=lambda name: more[name])
    if one.seconds.total <= best.seconds.total or more[most] <= 0:
        return ""
    return f"{names[most]} (+{100 * more[most] / best.seconds.total:.0f} %)"
