"""Keyword arguments of calls that take options, for type checkers and editors.

`make options` writes this file, from the docstrings under the fields of the dataclasses of options.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

__all__ = ["OptionKeywords"]


class OptionKeywords(TypedDict, total=False):
    """Options, all of which may be left out; an unpacked ``dict`` of any names is allowed as well."""

    partitions: int | None
    """Alias of ``pipeline_parallel_degree``."""
    report: Literal["quiet", "short", "full"]
    """Alias of ``smp_report``."""
    pipeline_parallel_degree: int | None
    """Number of pipeline stages; ``partitions`` is an alias. ``None``: as many as there are ranks and units, but 1
    (SageMaker's default) if parameters or optimizer state are sharded."""
    microbatches: int | None
    """Microbatches per step. ``None``: 4 per stage, or as many as the batch has samples; 1 if there is one stage, or if
    the loss compares samples. SageMaker's calls take 1."""
    evaluation_microbatches: int
    """Microbatches of a step without gradients: 1 for metrics of the whole batch; more overlap stages and save memory.
    SageMaker's steps return one result for each of ``microbatches``, and stay so."""
    active_microbatches: int | None
    """Most microbatches in flight on a rank. ``None``: as the schedule needs (``interleaved``: stages + 2)."""
    share_batches: bool
    """The first rank of a replica sends its batches to the others, whose datasets may give other samples."""
    pipeline: Literal["interleaved", "simple", "1f1b", "zb-h1", "zb-h2", "zb-v", "auto"]
    """Order of the work of a stage. ``interleaved``: backward work that is ready goes first. ``simple``: all forwards,
    then all backwards. ``1f1b``: one forward, one backward in turn, Megatron's interleaving under virtual stages.
    ``zb-h1``, ``zb-h2``, ``zb-v``: zero bubble, with weight gradients in the bubbles. ``auto``: the fastest one that
    fits."""
    virtual_pipeline_degree: int | None
    """Chunks of the model on each stage. ``None``: 2 under ``zb-v``, chosen under ``auto``, else 1."""
    placement_strategy: str
    """Rank order: ``cluster`` (= ``DPT``), ``spread`` (= ``TPD``) or a permutation of D, P, T; the right-most letter
    varies fastest. Under ``cluster``, shard groups vary faster than P if they span fewer nodes then."""
    loss_weighting: Literal["auto", "samples"]
    """Weights of the microbatches' losses. ``auto``: those with which the loss is that of the whole batch, also where
    means are over different numbers of elements. ``samples``: numbers of samples, as under gradient accumulation."""
    stage_transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl", "gloo"]
    """Path of large tensors between stages. ``auto``: the best one that has worked in a trial, for tensors of CUDA
    devices in the order ``cuda_ipc`` (memory of the device), ``shared_memory``, ``nccl``, ``gloo`` (sockets), else
    ``shared_memory`` or ``gloo``. The others: an error where they are impossible. SageMaker has no such option."""
    auto_partition: bool
    """Choose the stage of every unit automatically."""
    default_partition: int | None
    """With ``auto_partition=False``: stage of units without one."""
    optimize: Literal["memory", "speed"]
    """Priority of the partitioner; it sets the default of ``memory_weight``. SageMaker's default is ``memory``, but its
    cost weighs balance, while ours weighs the time of a step, which ``memory`` trades for memory. With
    ``tensor_parallel_degree``, ``memory`` also splits activations between the blocks of transformers along the
    sequence."""
    memory_weight: float | None
    """Weight of memory against compute time, 0 to 1. ``None``: 0.8 for ``memory``, 0.2 for ``speed``."""
    memory_limit: int | str | Sequence[int | str] | None
    """Memory of a rank: bytes, a text like ``16GiB``, or a list with one of these per stage. ``None``: memory of the
    device, divided by the ranks that share it. Stages are cut to fit; shards that do not fit lower
    ``sdp_max_live_parameters``, then recompute activations."""
    stage_speeds: Sequence[float] | None
    """Relative speed of each stage: ``[1, 1, 2]`` if the last is twice as fast. ``None``: all equal."""
    partition_file: str | None
    """JSON file that the partition is written to, or read from."""
    load_partition: bool
    """Read the partition from ``partition_file`` instead of choosing one."""
    restore_module: Literal["all", "rank_zero", "none"] | None
    """Ranks that have an ordinary module with all weights again when a run (fit, test ...) ends. On other ranks only
    the rank's own units can be used then. ``None``: ``none`` with ``delayed_parameter_initialization``, since such a
    module may fit on no rank, and otherwise ``all``. Every later run begins with the whole module on all ranks."""
    skip_tracing: bool
    """Partition by parameter counts in registration order, without a dry run of the step. The step must not read
    attributes that blocks set (``block.aux_loss``): only the dry run detects that."""
    trace_execution_times: bool
    """Measure unit times on the device instead of modelling them."""
    trace_memory_usage: bool
    """Measure activation memory on the device instead of modelling it."""
    trace_device: Literal["cpu", "gpu"] | None
    """Device of the measurement. ``None``: device of the step."""
    unit_classes: Sequence[str]
    """Classes of modules that are never split over stages, by name or by qualified name."""
    compile: bool
    """Run each unit through ``torch.compile``; code above the units is not compiled."""
    sharded_data_parallel_degree: int
    """Number of ranks over which parameters, gradients and optimizer state are sharded."""
    shard_optimizer_state: bool
    """Shard optimizer state and gradients over all data-parallel replicas, by whole parameters (ZeRO-1). With
    ``sharded_data_parallel_degree``: over the replicas of each shard group as well, by pieces of parameters."""
    broadcast_buffers: bool
    """When gradients are averaged, broadcast the buffers that steps have changed (running statistics) from the first
    replica; DistributedDataParallel does that before a forward. ``False``: each replica keeps its own."""
    ddp_reduction: Literal["auto", "hierarchical", "flat"]
    """Sums of gradients over replicas. ``hierarchical``: gradients fill fusion buffers of 4 MB, which are reduced in
    each node, then between nodes, so that each byte crosses the slow link once per node. ``flat``: the backend's
    all-reduce. ``auto``: ``hierarchical`` if the replicas of a stage span several nodes with several ranks each; in
    shared memory if they are on one node; else ``flat``. A given ``hierarchical`` refuses nodes with different numbers
    of replicas, and is ``flat`` where there is no hierarchy. For gloo only: other backends know their links."""
    sdp_reduce_bucket_size: int
    """Bucket size of the reduce-scatter over a shard group, in elements. A unit is reduced as a whole after its
    backward; a larger one is reduced in slices, one after the other, which need less temporary memory. For gloo;
    results are bit-identical for any size."""
    sdp_param_persistence_threshold: int
    """Parameters with fewer elements stay gathered from their first use to the optimizer's step; their gradients and
    state are sharded like all others. SageMaker's default is 1,000,000, because each parameter is gathered by itself
    there. Here a unit is gathered as a whole, so small parameters cost no messages of their own, and by default all
    parameters are sharded."""
    sdp_max_live_parameters: int
    """Most gathered elements for prefetching, if units are gathered for each use. A unit in use is always gathered, so
    there must be room for the largest."""
    sdp_hierarchical_allgather: bool
    """For a shard group that spans nodes: gather between nodes first, then inside each node. Results are bit-identical:
    reductions are hierarchical in any case."""
    sdp_gather: Literal["auto", "step", "use"]
    """When parameters are gathered. ``use``: those of a unit for each use, and freed after it. ``step``: all of them
    once, kept until the end of the batch, for less communication and more memory. ``auto``: ``step`` with a pipeline,
    in which a unit is used once per microbatch, else ``use``. Under ``use`` with a pipeline, steps must not read values
    (``.item()``, ``if loss > 1``), which could lead replicas to different units."""
    sdp_gradient_clipping: float | None
    """Global gradient norm to clip to before each step of an optimizer. SageMaker's default is 1.0, always on. Here
    ``None``: off, because Lightning and Accelerate clip themselves (in Lightning ``gradient_clip_val``, by the same
    true norm)."""
    delayed_parameter_initialization: bool
    """Initialize a model on the meta device in the first step, each rank only its own part; Lightning's
    `configure_model` then builds on that device. A model with values keeps them."""
    tensor_parallel_degree: int
    """Number of ranks over which layers are split."""
    prescaled_batch: bool
    """All tensor-parallel ranks of a replica read the same batch. ``False``, SageMaker's default: each reads its own
    samples, and a step computes the samples of all of them."""
    tensor_parallel: Mapping[str, str] | None
    """Split of layers by patterns of their names: ``{"*.mlp.up": "column", "*.mlp.down": "row"}``. It takes precedence
    over the plans of the model, its family and the registry."""
    tensor_parallel_strict: bool
    """Raise an error for a layer with a matrix that is not split, unless the user has asked for that."""
    activation_checkpointing: str | Sequence[str]
    """Units that keep only their inputs and recompute the rest in backward: ``none``, ``all``, or units by patterns of
    module names or by classes: ``blocks.*``, ``GPT2Block``. ``auto``: only as many as `memory_limit` makes
    necessary."""
    checkpoint_strategy: str
    """Grouping of units of one list that follow each other on a stage: ``each`` is recomputed by itself, all of them
    together (``contiguous``), or N together (``group_N``). A group keeps only the inputs of its first unit."""
    selective_checkpointing: bool
    """Keep the results of matrix products, convolutions and attention as well, and recompute only the rest."""
    preserve_rng_state: bool
    """Recompute with the same random numbers, in dropout for instance."""
    offload_activations: bool
    """Offload activations to host memory: the inputs of recomputed units, or all activations if none are recomputed."""
    offload_min_bytes: int | str
    """Size from which tensors are offloaded: bytes, or text like ``256KiB``."""
    activation_loading_horizon: int
    """Pipeline actions (calls of units with one stage) by which offloaded activations are loaded ahead of their use.
    Activations that are needed sooner than that after forward are not offloaded."""
    fp16: bool
    """Units compute in float16, with loss scaling, on float32 master weights."""
    bf16: bool
    """Units compute in bfloat16, on float32 master weights. SageMaker has this with sharding only."""
    fp16_params: bool
    """Parameters themselves are float16, without float32 master weights. Units compute in float16."""
    gradient_dtype: Literal["float32", "parameter"]
    """Dtype in which gradients of half-precision parameters are added up, over microbatches, batches and ranks.
    ``float32``: digits of a sum are not lost because a batch was cut. ``parameter``: that of the parameter, bit for bit
    as PyTorch accumulates. Parameters in float32 (masters) have float32 gradients either way."""
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None
    """Dtype of gradient reductions over replicas and shard groups. ``None``: the dtype in which each rank accumulates
    gradients; see ``gradient_dtype``."""
    loss_scale: int | float | str | None
    """Factor on the loss that keeps float16 gradients from underflow: ``dynamic``, or a constant number. ``None``:
    ``dynamic`` whenever units compute in float16, except under Lightning's ``precision="16-true"``, which has none.
    SageMaker's ``static_loss_scale`` and ``dynamic_loss_scale``."""
    init_scale: float
    """Initial dynamic scale. SageMaker's default is 2**32, which overflows a dozen times first; this is PyTorch's."""
    scale_factor: float
    """Factor by which a dynamic scale grows and shrinks."""
    scale_window: int
    """Steps without overflow after which a dynamic scale grows. SageMaker's default is 1000; this is PyTorch's."""
    min_scale: float
    """Lower limit of a dynamic scale."""
    delayed_shift: int
    """Number of overflows after which a dynamic scale shrinks; each of them skips its step."""
    consecutive_hysteresis: bool
    """Whether these overflows must follow each other directly; otherwise they are counted until the scale grows."""
    state_dict_type: Literal["full", "sharded"]
    """Form of checkpoints. ``full``: one ordinary file, as a single process writes it. ``sharded``: a directory in the
    format of ``torch.distributed.checkpoint``, to which each rank writes its shards."""
    async_save: bool
    """Write files in the background: training stops only for the copy to host memory."""
    checkpoint_weights_only: bool
    """Load only tensors and plain values, so that no file can run code. ``False``: load any pickled object of the full
    form; use it only for files that you trust. ``trainer.fit(..., weights_only=)`` takes precedence."""
    smp_report: Literal["quiet", "short", "full"]
    """Text about the layout. ``short``: at the end of the first training step, at most 25 lines: mesh, stages, memory,
    predicted and measured times, the one change that would help most. ``full``: also tables of the partition, the split
    layers and the paths of messages as soon as they are known. ``quiet``: nothing but advice and warnings. ``report``
    is an alias."""
