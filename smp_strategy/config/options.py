"""Options by concern: pipeline, partition, tracing, units, sharding, tensor parallelism.

Names and defaults are those of SageMaker's model parallel library unless an option says otherwise, so that an existing
configuration can be copied over. Options that SageMaker does not have (``virtual_pipeline_degree``, ``memory_limit``)
have the standard names of the field. :mod:`smp_strategy.config.config` validates combinations of options. This module
does not import torch.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Literal

from smp_strategy.config.parsing import at_least_one, one_of
from smp_strategy.config.sizes import as_bytes

__all__ = [
    "DDPReduction",
    "Gather",
    "LossWeighting",
    "PartitionOptions",
    "PipelineOptions",
    "ReportOptions",
    "RestoreModule",
    "Schedule",
    "ShardingOptions",
    "StageTransport",
    "TensorParallelOptions",
    "TraceOptions",
    "UnitOptions",
]

Optimize = Literal["memory", "speed"]
Schedule = Literal["interleaved", "simple", "1f1b", "zb-h1", "zb-h2", "zb-v", "auto"]
TraceDevice = Literal["cpu", "gpu"]
RestoreModule = Literal["all", "rank_zero", "none"]
Gather = Literal["auto", "step", "use"]
StageTransport = Literal["auto", "shared_memory", "cuda_ipc", "nccl", "gloo"]
LossWeighting = Literal["auto", "samples"]
DDPReduction = Literal["auto", "hierarchical", "flat"]
SMPReport = Literal["quiet", "short", "full"]

# ZB-V folds the model once: down the stages and up again.
CHUNKS_OF_ZB_V = 2
# Planning takes minutes for more.
MOST_MICROBATCHES = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Pipeline parallelism: stages, microbatches, schedule, placement of ranks."""

    pipeline_parallel_degree: int | None = None
    """Number of pipeline stages; ``partitions`` is an alias. ``None``: as many as there are ranks and units, but 1
    (SageMaker's default) if parameters or optimizer state are sharded."""
    microbatches: int | None = None
    """Microbatches per step. ``None``: 4 per stage, or as many as the batch has samples; 1 if there is one stage, or if
    the loss compares samples. SageMaker's calls take 1."""
    evaluation_microbatches: int = 1
    """Microbatches of a step without gradients: 1 for metrics of the whole batch; more overlap stages and save memory.
    SageMaker's steps return one result for each of ``microbatches``, and stay so."""
    active_microbatches: int | None = None
    """Most microbatches in flight on a rank. ``None``: as the schedule needs (``interleaved``: stages + 2)."""
    share_batches: bool = False
    """The first rank of a replica sends its batches to the others, whose datasets may give other samples."""
    pipeline: Schedule = "interleaved"
    """Order of the work of a stage. ``interleaved``: backward work that is ready goes first. ``simple``: all forwards,
    then all backwards. ``1f1b``: one forward, one backward in turn, Megatron's interleaving under virtual stages.
    ``zb-h1``, ``zb-h2``, ``zb-v``: zero bubble, with weight gradients in the bubbles. ``auto``: the fastest one that
    fits."""
    virtual_pipeline_degree: int | None = None
    """Chunks of the model on each stage. ``None``: 2 under ``zb-v``, chosen under ``auto``, else 1."""
    placement_strategy: str = "cluster"
    """Rank order: ``cluster`` (= ``DPT``), ``spread`` (= ``TPD``) or a permutation of D, P, T; the right-most
    letter varies fastest. Under ``cluster``, shard groups vary faster than P if they span fewer nodes then."""
    loss_weighting: LossWeighting = "auto"
    """Weights of the microbatches' losses. ``auto``: those with which the loss is that of the whole batch, also where
    means are over different numbers of elements. ``samples``: numbers of samples, as under gradient accumulation."""
    stage_transport: StageTransport = "auto"
    """Path of large tensors between stages. ``auto``: the best one that has worked in a trial, for tensors of CUDA
    devices in the order ``cuda_ipc`` (memory of the device), ``shared_memory``, ``nccl``, ``gloo`` (sockets), else
    ``shared_memory`` or ``gloo``. The others: an error where they are impossible. SageMaker has no such option."""

    def _problems(self) -> list[str]:
        found = at_least_one(self, "pipeline_parallel_degree", "microbatches", "active_microbatches")
        found += at_least_one(self, "virtual_pipeline_degree", "evaluation_microbatches")
        if self.microbatches is not None and self.microbatches > MOST_MICROBATCHES:
            found.append(
                f"`microbatches` must be at most {MOST_MICROBATCHES}, but is {self.microbatches}: the schedule has "
                "actions for each of them. Choose about 4 times the number of stages."
            )
        words = {"pipeline": Schedule, "stage_transport": StageTransport, "loss_weighting": LossWeighting}
        for name, known in words.items():
            found += one_of(self, name, typing.get_args(known))
        found += self._wrong_chunks()
        if self.placement_strategy not in ("cluster", "spread") and sorted(self.placement_strategy) != ["D", "P", "T"]:
            found.append(
                "`placement_strategy` must be `cluster`, `spread` or a permutation of the letters D, P and T, "
                f"but is {self.placement_strategy!r}."
            )
        return found

    def _wrong_chunks(self) -> list[str]:
        chunks = self.virtual_pipeline_degree
        if self.pipeline in ("zb-h1", "zb-h2") and chunks is not None and chunks > 1:
            return [
                f"`virtual_pipeline_degree` ({chunks}) contradicts `pipeline={self.pipeline}`, which has one chunk per "
                "stage. Leave the degree out, or choose `zb-v`."
            ]
        if self.pipeline == "zb-v" and chunks not in (None, CHUNKS_OF_ZB_V):
            return [
                f"`virtual_pipeline_degree` ({chunks}) contradicts `pipeline=zb-v`, which has {CHUNKS_OF_ZB_V} chunks "
                "per stage. Leave the degree out, or choose `1f1b`."
            ]
        return []

    @property
    def chunks_per_stage(self) -> int | None:
        """``virtual_pipeline_degree`` with the default of the schedule; ``None`` if ``auto`` chooses."""
        if self.virtual_pipeline_degree is not None:
            return self.virtual_pipeline_degree
        return {"zb-v": CHUNKS_OF_ZB_V, "auto": None}.get(self.pipeline, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Assignment of units to stages."""

    auto_partition: bool = True
    """Choose the stage of every unit automatically."""
    default_partition: int | None = None
    """With ``auto_partition=False``: stage of units without one."""
    optimize: Optimize = "speed"
    """Priority of the partitioner; it sets the default of ``memory_weight``. SageMaker's default is ``memory``,
    but its cost weighs balance, while ours weighs the time of a step, which ``memory`` trades for memory. With
    ``tensor_parallel_degree``, ``memory`` also splits activations between the blocks of transformers along the
    sequence."""
    memory_weight: float | None = None
    """Weight of memory against compute time, 0 to 1. ``None``: 0.8 for ``memory``, 0.2 for ``speed``."""
    memory_limit: int | str | tuple[int | str, ...] | None = None
    """Memory of a rank: bytes, a text like ``16GiB``, or a list with one of these per stage. ``None``: memory of the
    device, divided by the ranks that share it. Stages are cut to fit; shards that do not fit lower
    ``sdp_max_live_parameters``, then recompute activations."""
    stage_speeds: tuple[float, ...] | None = None
    """Relative speed of each stage: ``[1, 1, 2]`` if the last is twice as fast. ``None``: all equal."""
    partition_file: str | None = None
    """JSON file that the partition is written to, or read from."""
    load_partition: bool = False
    """Read the partition from ``partition_file`` instead of choosing one."""
    restore_module: RestoreModule | None = None
    """Ranks that have an ordinary module with all weights again when a run (fit, test ...) ends. On other ranks only
    the rank's own units can be used then. ``None``: ``none`` with ``delayed_parameter_initialization``, since such a
    module may fit on no rank, and otherwise ``all``. Every later run begins with the whole module on all ranks."""

    def _problems(self) -> list[str]:
        found = one_of(self, "optimize", typing.get_args(Optimize))
        found += one_of(self, "restore_module", (None, *typing.get_args(RestoreModule)))
        weight = self.memory_weight
        if weight is not None and not (isinstance(weight, (int, float)) and 0 <= weight <= 1):
            found.append(f"`memory_weight` must be between 0 and 1, but is {weight!r}.")
        speeds = self.stage_speeds
        if speeds is not None and not all(0 < speed < float("inf") for speed in speeds):
            found.append(f"`stage_speeds` must be above 0 and finite, but are {list(speeds)}.")
        if self.default_partition is not None and self.default_partition < 0:
            found.append(f"`default_partition` must be at least 0, but is {self.default_partition}.")
        if self.partition_file is not None and (not self.partition_file.strip() or "://" in self.partition_file):
            found.append(
                f"`partition_file` must be the path of a file on this machine, but is {self.partition_file!r}."
            )
        found += [
            f"`{name}` must have one entry for each stage, but has none. Give them, or leave it out."
            for name in ("memory_limit", "stage_speeds")
            if getattr(self, name) == ()
        ]
        for limit in _each(self.memory_limit):
            try:
                if as_bytes(limit) < 1:
                    found.append(f"`memory_limit` must be at least 1 byte, but is {limit!r}.")
            except ValueError as error:
                found.append(f"`memory_limit`: {error}")
        return found

    def _problems_with(self, num_stages: int) -> list[str]:
        """Error texts for these options with ``num_stages`` stages."""
        found = []
        for name in ("memory_limit", "stage_speeds"):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) != num_stages:
                found.append(
                    f"`{name}` must have one entry for each of the {num_stages} stages, but has {len(given)}: "
                    f"{list(given)}."
                )
        if self.default_partition is not None and self.default_partition >= num_stages:
            found.append(
                f"`default_partition` must be one of the {num_stages} stages, 0 to {num_stages - 1}, but is "
                f"{self.default_partition}."
            )
        return found

    @property
    def resolved_memory_weight(self) -> float:
        """``memory_weight``, or the default that ``optimize`` implies."""
        if self.memory_weight is not None:
            return float(self.memory_weight)
        return 0.8 if self.optimize == "memory" else 0.2

    def memory_limits(self, num_stages: int) -> tuple[int, ...] | None:
        """Memory limit of each of ``num_stages`` stages in bytes; ``None``: memory of the device."""
        if self.memory_limit is None:
            return None
        limits = tuple(as_bytes(limit) for limit in _each(self.memory_limit))
        return limits if isinstance(self.memory_limit, tuple) else limits * num_stages

    def speeds(self, num_stages: int) -> tuple[float, ...]:
        """Relative speed of each of ``num_stages`` stages."""
        return (1.0,) * num_stages if self.stage_speeds is None else tuple(map(float, self.stage_speeds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Tracing of a step, and measurement of its costs."""

    skip_tracing: bool = False
    """Partition by parameter counts in registration order, without a dry run of the step. The step must not
    read attributes that blocks set (``block.aux_loss``): only the dry run detects that."""
    trace_execution_times: bool = False
    """Measure unit times on the device instead of modelling them."""
    trace_memory_usage: bool = False
    """Measure activation memory on the device instead of modelling it."""
    trace_device: TraceDevice | None = None
    """Device of the measurement. ``None``: device of the step."""

    def _problems(self) -> list[str]:
        found = one_of(self, "trace_device", (*typing.get_args(TraceDevice), None))
        if self.trace_device is not None and not (self.trace_execution_times or self.trace_memory_usage):
            found.append(
                f"`trace_device={self.trace_device}` says where to measure, but nothing is measured. Set "
                "`trace_execution_times` or `trace_memory_usage`, or leave it out."
            )
        asked = [
            name for name in ("trace_execution_times", "trace_memory_usage", "trace_device") if getattr(self, name)
        ]
        if self.skip_tracing and asked:
            named = " and ".join(f"`{name}`" for name in asked)
            verb = "contradicts" if len(asked) == 1 else "contradict"
            found.append(f"{named} {verb} `skip_tracing=True`: without tracing nothing is measured. Leave one out.")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """Units, the smallest parts that are placed on stages."""

    unit_classes: tuple[str, ...] = ()
    """Classes of modules that are never split over stages, by name or by qualified name."""
    compile: bool = False
    """Run each unit through ``torch.compile``; code above the units is not compiled."""

    def _problems(self) -> list[str]:
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Sharded data parallelism (MiCS) and optimizer-state sharding."""

    sharded_data_parallel_degree: int = 1
    """Number of ranks over which parameters, gradients and optimizer state are sharded."""
    shard_optimizer_state: bool = False
    """Shard optimizer state and gradients over all data-parallel replicas, by whole parameters (ZeRO-1). With
    ``sharded_data_parallel_degree``: over the replicas of each shard group as well, by pieces of parameters."""
    broadcast_buffers: bool = True
    """When gradients are averaged, broadcast the buffers that steps have changed (running statistics) from the first
    replica; DistributedDataParallel does that before a forward. ``False``: each replica keeps its own."""
    ddp_reduction: DDPReduction = "auto"
    """Sums of gradients over replicas. ``hierarchical``: gradients fill fusion buffers of 4 MB, which are reduced in
    each node, then between nodes, so that each byte crosses the slow link once per node. ``flat``: the backend's
    all-reduce. ``auto``: ``hierarchical`` if the replicas of a stage span several nodes with several ranks each; in
    shared memory if they are on one node; else ``flat``. A given ``hierarchical`` refuses nodes with different numbers
    of replicas, and is ``flat`` where there is no hierarchy. For gloo only: other backends know their links."""
    sdp_reduce_bucket_size: int = 500_000_000
    """Bucket size of the reduce-scatter over a shard group, in elements. A unit is reduced as a whole after its
    backward; a larger one is reduced in slices, one after the other, which need less temporary memory. For gloo;
    results are bit-identical for any size."""
    sdp_param_persistence_threshold: int = 0
    """Parameters with fewer elements stay gathered from their first use to the optimizer's step; their gradients and
    state are sharded like all others. SageMaker's default is 1,000,000, because each parameter is gathered by itself
    there. Here a unit is gathered as a whole, so small parameters cost no messages of their own, and by default all
    parameters are sharded."""
    sdp_max_live_parameters: int = 1_000_000_000
    """Most gathered elements for prefetching, if units are gathered for each use. A unit in use is always gathered, so
    there must be room for the largest."""
    sdp_hierarchical_allgather: bool = True
    """For a shard group that spans nodes: gather between nodes first, then inside each node. Results are bit-identical:
    reductions are hierarchical in any case."""
    sdp_gather: Gather = "auto"
    """When parameters are gathered. ``use``: those of a unit for each use, and freed after it. ``step``: all of them
    once, kept until the end of the batch, for less communication and more memory. ``auto``: ``step`` with a pipeline,
    in which a unit is used once per microbatch, else ``use``. Under ``use`` with a pipeline, steps must not read values
    (``.item()``, ``if loss > 1``), which could lead replicas to different units."""
    sdp_gradient_clipping: float | None = None
    """Global gradient norm to clip to before each step of an optimizer. SageMaker's default is 1.0, always on. Here
    ``None``: off, because Lightning and Accelerate clip themselves (in Lightning ``gradient_clip_val``, by the same
    true norm)."""
    delayed_parameter_initialization: bool = False
    """Initialize a model on the meta device in the first step, each rank only its own part; Lightning's
    `configure_model` then builds on that device. A model with values keeps them."""

    def _problems(self) -> list[str]:
        found = at_least_one(self, "sharded_data_parallel_degree", "sdp_reduce_bucket_size", "sdp_max_live_parameters")
        found += one_of(self, "sdp_gather", typing.get_args(Gather))
        found += one_of(self, "ddp_reduction", typing.get_args(DDPReduction))
        if self.sdp_param_persistence_threshold < 0:
            found.append(
                f"`sdp_param_persistence_threshold` must be at least 0, but is {self.sdp_param_persistence_threshold}."
            )
        if self.ddp_reduction == "hierarchical" and self.deals_out_parameters:
            found.append(
                "`ddp_reduction=hierarchical` contradicts `shard_optimizer_state=True`: each gradient is summed on the "
                "one rank that updates its parameter, not on all. Leave one of them out, or set "
                "`sharded_data_parallel_degree` as well."
            )
        norm = self.sdp_gradient_clipping
        if norm is not None and not norm > 0:
            found.append(f"`sdp_gradient_clipping` must be above 0, or None for no clipping, but is {norm}.")
        return found + self._without_effect()

    @property
    def deals_out_parameters(self) -> bool:
        """Whether each replica updates some parameters, as a whole (ZeRO-1)."""
        return self.shard_optimizer_state and self.sharded_data_parallel_degree == 1

    def gathers_once(self, num_stages: int) -> bool:
        """Whether all units of a stage are gathered once per step instead of for each use."""
        return self.sdp_gather == "step" or (self.sdp_gather == "auto" and num_stages > 1)

    def _problems_of_gathering(self, num_stages: int) -> list[str]:
        is_limited = self.sdp_max_live_parameters != ShardingOptions.sdp_max_live_parameters
        if self.sharded_data_parallel_degree == 1 or not is_limited or not self.gathers_once(num_stages):
            return []
        why = f"`sdp_gather={self.sdp_gather}`" + (f" with {num_stages} stages" if self.sdp_gather == "auto" else "")
        return [
            f"`sdp_max_live_parameters` ({self.sdp_max_live_parameters}) limits what is gathered ahead, but {why} "
            "gathers everything once per step. Set `sdp_gather=use`, or leave it out."
        ]

    def _without_effect(self) -> list[str]:
        if self.sharded_data_parallel_degree != 1:
            return []
        given = [
            f"`{field.name}={getattr(self, field.name)!r}`"
            for field in dataclasses.fields(ShardingOptions)
            if field.name.startswith("sdp_") and getattr(self, field.name) != field.default
        ]
        if not given:
            return []
        verb, them = ("has", "it") if len(given) == 1 else ("have", "them")
        return [
            f"{' and '.join(given)} {verb} no effect, because no parameters are sharded. Set "
            f"`sharded_data_parallel_degree`, or leave {them} out."
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallelOptions:
    """Tensor-parallel layers."""

    tensor_parallel_degree: int = 1
    """Number of ranks over which layers are split."""
    prescaled_batch: bool = True
    """All tensor-parallel ranks of a replica read the same batch. ``False``, SageMaker's default: each reads its own
    samples, and a step computes the samples of all of them."""
    tensor_parallel: Mapping[str, str] | None = None
    """Split of layers by patterns of their names: ``{"*.mlp.up": "column", "*.mlp.down": "row"}``. It takes precedence
    over the plans of the model, its family and the registry."""
    tensor_parallel_strict: bool = False
    """Raise an error for a layer with a matrix that is not split, unless the user has asked for that."""

    def _problems(self) -> list[str]:
        found = at_least_one(self, "tensor_parallel_degree")
        if not all(name.strip() for name in self.tensor_parallel or {}):
            found.append("`tensor_parallel` has an empty name. Name modules by patterns: `blocks.*.up`.")
        if self.tensor_parallel_degree == 1:
            given = [name for name in ("tensor_parallel", "tensor_parallel_strict") if getattr(self, name)]
            given += [] if self.prescaled_batch else ["prescaled_batch"]
            found += [
                f"`{name}={getattr(self, name)!r}` has no effect, because no layers are split. Set "
                "`tensor_parallel_degree`, or leave it out."
                for name in given
            ]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Report of the first training step."""

    smp_report: SMPReport = "short"
    """Text about the layout. ``short``: at the end of the first training step, at most 25 lines: mesh, stages, memory,
    predicted and measured times, the one change that would help most. ``full``: also tables of the partition, the
    split layers and the paths of messages as soon as they are known. ``quiet``: nothing but advice and warnings.
    ``report`` is an alias."""

    def _problems(self) -> list[str]:
        return one_of(self, "smp_report", typing.get_args(SMPReport))


def _each(limit: int | str | tuple[int | str, ...] | None) -> tuple[int | str, ...]:
    """The given limits: none, one for all stages, or one for each."""
    if limit is None:
        return ()
    return limit if isinstance(limit, tuple) else (limit,)
