"""The options by concern: what there is, what it means, and which values are in range.

Names are those of SageMaker's model parallel library, and defaults too unless an option says so, so that an existing
configuration can be copied over. What the library does not have (``virtual_pipeline_degree``, ``memory_limit`` ...) is
named by the field's terms. Whether options go together is a question for :mod:`smp_strategy.config.config`. Nothing
here imports torch.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Literal

from smp_strategy.config.parsing import at_least_one, one_of
from smp_strategy.config.sizes import parse_bytes

__all__ = [
    "ActivationOptions",
    "Gather",
    "PartitionOptions",
    "PipelineOptions",
    "RestoreModule",
    "Schedule",
    "ShardingOptions",
    "TensorParallelOptions",
    "TraceOptions",
    "UnitOptions",
    "group_size",
]

Optimize = Literal["memory", "speed"]
Schedule = Literal["interleaved", "simple", "1f1b", "zb-h1", "zb-h2", "zb-v", "auto"]
TraceDevice = Literal["cpu", "gpu"]
RestoreModule = Literal["all", "rank_zero", "none"]
Gather = Literal["auto", "step", "use"]

# ZB-V folds the model once: down the stages and up again.
CHUNKS_OF_ZB_V = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a batch flows through the stages."""

    pipeline_parallel_degree: int | None = None
    """Number of pipeline stages; ``partitions`` is an alias. ``None``: as many as there are ranks and units, but 1
    (SageMaker's default) where parameters or optimizer state are sharded."""
    microbatches: int | None = None
    """Microbatches per step. ``None``: 1 where a degree is given or there is one stage, else 4 per stage."""
    active_microbatches: int | None = None
    """Most microbatches in flight on a rank at once; it caps activation memory. ``None``: what the schedule needs
    (``interleaved``: number of stages + 2)."""
    pipeline: Schedule = "interleaved"
    """``interleaved``: backward work that is ready goes first. ``simple``: all forwards, then all backwards.
    ``1f1b``: one forward, one backward in turn, Megatron's interleaving under virtual stages. ``zb-h1``, ``zb-h2``,
    ``zb-v``: zero bubble, where the gradients of weights fill the waits. ``auto``: whichever is fastest and fits."""
    virtual_pipeline_degree: int | None = None
    """Chunks of the model on each stage. ``None``: 2 under ``zb-v``, chosen under ``auto``, else 1."""
    placement_strategy: str = "cluster"
    """Rank order: ``cluster`` (= ``DPT``), ``spread`` (= ``TPD``) or a permutation of D, P, T; the right-most
    letter varies fastest. ``cluster`` lets shard groups vary faster than P where they touch fewer nodes then."""

    def _problems(self) -> list[str]:
        found = at_least_one(self, "pipeline_parallel_degree", "microbatches", "active_microbatches")
        found += at_least_one(self, "virtual_pipeline_degree")
        found += one_of(self, "pipeline", typing.get_args(Schedule))
        found += self._wrong_chunks()
        known = self.placement_strategy in ("cluster", "spread") or sorted(self.placement_strategy) == ["D", "P", "T"]
        if not known:
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
        """``virtual_pipeline_degree`` with the default that the schedule implies; ``None`` where ``auto`` chooses."""
        if self.virtual_pipeline_degree is not None:
            return self.virtual_pipeline_degree
        return {"zb-v": CHUNKS_OF_ZB_V, "auto": None}.get(self.pipeline, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """How units are given to stages."""

    auto_partition: bool = True
    """Let the library choose the stage of every unit."""
    default_partition: int | None = None
    """With ``auto_partition=False``: the stage of units that nobody placed."""
    optimize: Optimize = "speed"
    """What the partitioner weighs more; it sets the default of ``memory_weight``. SageMaker's default is ``memory``,
    but its cost weighs balance, while ours weighs the time of a step, which ``memory`` gives away for memory. With
    ``tensor_parallel_degree`` ``memory`` also splits activations between the blocks of transformers, along the
    sequence."""
    memory_weight: float | None = None
    """Weight of memory against compute time, 0 to 1. ``None``: 0.8 for ``memory``, 0.2 for ``speed``."""
    memory_limit: int | str | tuple[int | str, ...] | None = None
    """Memory of a rank: bytes, a text like ``16GiB``, or a list with one of these per stage. ``None``: what the device
    has, divided by the ranks that share it."""
    stage_speeds: tuple[float, ...] | None = None
    """How fast each stage computes, one number per stage: ``[1, 1, 2]``, if the last is twice as fast. ``None``: all
    alike."""
    partition_file: str | None = None
    """Where the decision is written to (JSON), or read from."""
    load_partition: bool = False
    """Read the decision from ``partition_file`` instead of making one."""
    restore_module: RestoreModule = "all"
    """Which ranks have an ordinary module with all weights again when a run (fit, test ...) ends. Elsewhere each rank
    keeps its own units, and using others is an error. Every run begins with the whole module on all ranks."""

    def _problems(self) -> list[str]:
        found = one_of(self, "optimize", typing.get_args(Optimize))
        found += one_of(self, "restore_module", typing.get_args(RestoreModule))
        weight = self.memory_weight
        if weight is not None and not (isinstance(weight, (int, float)) and 0 <= weight <= 1):
            found.append(f"`memory_weight` must be between 0 and 1, but is {weight!r}.")
        speeds = self.stage_speeds
        if speeds is not None and not all(0 < speed < float("inf") for speed in speeds):
            found.append(f"`stage_speeds` must be above 0, but are {list(speeds)}.")
        if self.default_partition is not None and self.default_partition < 0:
            found.append(f"`default_partition` must be at least 0, but is {self.default_partition}.")
        for limit in _each(self.memory_limit):
            try:
                if _bytes(limit) < 1:
                    found.append(f"`memory_limit` must be at least 1 byte, but is {limit!r}.")
            except ValueError as error:
                found.append(f"`memory_limit`: {error}")
        return found

    def _problems_with(self, num_stages: int) -> list[str]:
        """What is wrong with these options if there are ``num_stages`` stages."""
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
        """Bytes that each of ``num_stages`` stages may use; ``None`` where the device decides."""
        if self.memory_limit is None:
            return None
        limits = tuple(_bytes(limit) for limit in _each(self.memory_limit))
        return limits if isinstance(self.memory_limit, tuple) else limits * num_stages

    def speeds(self, num_stages: int) -> tuple[float, ...]:
        """How fast each of ``num_stages`` stages computes, relative to the others."""
        return (1.0,) * num_stages if self.stage_speeds is None else tuple(map(float, self.stage_speeds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How the library learns what a step does and what it costs."""

    skip_tracing: bool = False
    """Partition by parameter counts in registration order, without the dry run of the step. The step must not
    read attributes that blocks set (``block.aux_loss``): only the dry run notices."""
    trace_execution_times: bool = False
    """Measure unit times on the device instead of modelling them."""
    trace_memory_usage: bool = False
    """Measure activation memory on the device instead of modelling it."""
    trace_device: TraceDevice | None = None
    """Where to measure. ``None``: where the step will run."""

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
    """What moves as a whole, and how it runs."""

    unit_classes: tuple[str, ...] = ()
    """Classes whose modules stay whole on one stage, by name or by qualified name."""
    compile: bool = False
    """Run each unit through ``torch.compile``; code above the units stays as it is."""

    def _problems(self) -> list[str]:
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Sharded data parallelism (MiCS) and optimizer-state sharding."""

    sharded_data_parallel_degree: int = 1
    """Ranks over which parameters, gradients and optimizer state are sharded."""
    shard_optimizer_state: bool = False
    """Deal out optimizer state and gradients over all data-parallel replicas, whole parameters to each. With
    ``sharded_data_parallel_degree``: over the replicas of each shard group as well, pieces of parameters."""
    broadcast_buffers: bool = True
    """When gradients are averaged, let all replicas take over the buffers of the first one that steps have changed
    (running statistics), which DistributedDataParallel does before a forward. ``False``: each keeps its own."""
    sdp_reduce_bucket_size: int = 500_000_000
    """Gradients, in elements, that are added up over a shard group at once. A unit is reduced as a whole when its
    backward is over; one that is larger is reduced in slices, one after the other, which need less memory in between.
    For gloo; no bit depends on it."""
    sdp_param_persistence_threshold: int = 0
    """Parameters with fewer elements stay gathered from their first use to the optimizer's step; their gradients and
    state are sharded like all others. SageMaker's default is 1,000,000, because each parameter travels by itself there.
    Here a unit travels as a whole, so that small ones cost no messages of their own, and the default is what the
    degree promises: all of the parameters are sharded."""
    sdp_max_live_parameters: int = 1_000_000_000
    """Elements up to which units are gathered ahead, where they are gathered for each use. A unit in use is gathered in
    any case, so there must be room for the largest."""
    sdp_hierarchical_allgather: bool = True
    """Where a shard group spans nodes: gather between nodes first, then inside each node. No bit depends on it:
    reductions go by nodes in any case."""
    sdp_gather: Gather = "auto"
    """``use``: gather the parameters of a unit for each use, and free them after it. ``step``: gather them once, and
    keep them until the batch is through, for less communication and more memory. ``auto``: ``step`` with a pipeline,
    where a unit is used once per microbatch, else ``use``. Under ``use`` with a pipeline, steps must not read values
    (``.item()``, ``if loss > 1``), which could lead replicas to different units."""
    sdp_gradient_clipping: float | None = None
    """Global gradient norm to clip to before each step of an optimizer. SageMaker's default is 1.0, always on. Here
    ``None``: off, because front doors clip themselves (in Lightning ``gradient_clip_val``, by the same true norm)."""
    delayed_parameter_initialization: bool = False
    """Give values to a model on the meta device, on every rank to its own share only, in the first step; Lightning's
    `configure_model` then builds on that device. A model that has values keeps them."""

    def _problems(self) -> list[str]:
        found = at_least_one(self, "sharded_data_parallel_degree", "sdp_reduce_bucket_size", "sdp_max_live_parameters")
        found += one_of(self, "sdp_gather", typing.get_args(Gather))
        if self.sdp_param_persistence_threshold < 0:
            found.append(
                f"`sdp_param_persistence_threshold` must be at least 0, but is {self.sdp_param_persistence_threshold}."
            )
        norm = self.sdp_gradient_clipping
        if norm is not None and not norm > 0:
            found.append(f"`sdp_gradient_clipping` must be above 0, or None for no clipping, but is {norm}.")
        return found + self._without_effect()

    def gathers_once(self, num_stages: int) -> bool:
        """Whether the parameters of all units of a stage are gathered for a whole step, and not each for each use."""
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
    """Ranks over which layers are split."""
    prescaled_batch: bool = True
    """All tensor-parallel ranks of a replica read the same batch. ``False``, SageMaker's default: each reads samples of
    its own, and a step computes those of all of them."""
    tensor_parallel: Mapping[str, str] | None = None
    """How layers are split, by patterns of their names: ``{"*.mlp.up": "column", "*.mlp.down": "row"}``. They come
    before what the model, its family and the registry say of a layer."""
    tensor_parallel_strict: bool = False
    """A layer with a matrix that stays whole, though the user has not said that it is to, is an error."""

    def _problems(self) -> list[str]:
        found = at_least_one(self, "tensor_parallel_degree")
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
class ActivationOptions:
    """Activation checkpointing and offload."""

    activation_checkpointing: str | tuple[str, ...] = "none"
    """Units that keep their inputs only and compute the rest again in backward: ``none``, ``all``, or those of some
    modules, by patterns of their names or by classes: ``blocks.*``, ``GPT2Block``. ``auto``: what `memory_limit`
    makes necessary, and no more."""
    checkpoint_strategy: str = "each"
    """Units of one list that follow each other on a stage: ``each`` is computed again by itself, all of them together
    (``contiguous``), or N together (``group_N``). Of those together only the first one's inputs are kept."""
    selective_checkpointing: bool = False
    """Keep the results of matrix products, convolutions and attention as well, and compute only the rest again."""
    preserve_rng_state: bool = True
    """Draw the same random numbers again, in dropout for instance."""
    offload_activations: bool = False
    """Put what units keep for backward into host memory: the inputs of units that are computed again, or everything
    where none are."""
    offload_min_bytes: int | str = "1MiB"
    """Smaller tensors stay on the device: bytes, or text like ``256KiB``."""
    activation_loading_horizon: int = 4
    """How many pipeline actions ahead of their use offloaded activations are loaded, and how many calls of units where
    there is one stage. What is needed that soon after it was computed is not offloaded."""

    def _problems(self) -> list[str]:
        found = at_least_one(self, "activation_loading_horizon") + self._problems_of_offload()
        if group_size(self.checkpoint_strategy) == 0:
            found.append(
                "`checkpoint_strategy` must be each, contiguous or group_N with N from 1 on, but is "
                f"{self.checkpoint_strategy!r}."
            )
        given = [name for name in ("checkpoint_strategy", "preserve_rng_state") if _is_given(self, name)]
        if self.activation_checkpointing in ("none", ()) and given:
            found += [
                f"`{name}={getattr(self, name)!r}` has no effect, because nothing is computed again. Set "
                "`activation_checkpointing`, or leave it out."
                for name in given
            ]
        return found

    def _problems_of_offload(self) -> list[str]:
        found = []
        try:
            if _bytes(self.offload_min_bytes) < 0:
                found.append(f"`offload_min_bytes` must be at least 0, but is {self.offload_min_bytes}.")
        except ValueError as error:
            found.append(f"`offload_min_bytes`: {error}")
        if not self.offload_activations:
            found += [
                f"`{name}={getattr(self, name)!r}` has no effect, because nothing is offloaded. Set "
                "`offload_activations=True`, or leave it out."
                for name in ("offload_min_bytes", "activation_loading_horizon")
                if _is_given(self, name)
            ]
        return found

    @property
    def least_offloaded(self) -> int:
        """Bytes from which on tensors are offloaded."""
        return _bytes(self.offload_min_bytes)

    @property
    def checkpointing_patterns(self) -> tuple[str, ...]:
        """The modules that `activation_checkpointing` names."""
        given = self.activation_checkpointing
        if isinstance(given, str):
            given = () if given in ("none", "all", "auto") else tuple(given.split(","))
        return tuple(pattern.strip() for pattern in given if pattern.strip())


def group_size(strategy: str) -> int | None:
    """How many units in a row a checkpointing strategy takes together; ``None``: all, 0: there is no such strategy."""
    if strategy == "contiguous":
        return None
    if strategy == "each":
        return 1
    number = strategy.removeprefix("group_")
    return int(number) if number != strategy and number.isdecimal() else 0


def _each(limit: int | str | tuple[int | str, ...] | None) -> tuple[int | str, ...]:
    """The limits that are given, one for all stages or one for each."""
    if limit is None:
        return ()
    return limit if isinstance(limit, tuple) else (limit,)


def _bytes(limit: int | str) -> int:
    return parse_bytes(limit) if isinstance(limit, str) else limit


def _is_given(config: object, name: str) -> bool:
    return bool(getattr(config, name) != getattr(type(config), name))
