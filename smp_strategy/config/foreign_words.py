"""Words of Megatron, DeepSpeed, torch, Accelerate, vLLM and others for our options, so that errors name ours.

Whoever comes from another library writes its words. Similarity of letters finds none of them: ``tensor_parallel_size``
is nearer to ``tensor_parallel_strict`` than to ``tensor_parallel_degree``. So they stand in tables here, the only ones.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["NAMES", "NOTES", "VALUES", "meant_option", "meant_value"]

NAMES: Final[Mapping[str, str]] = {
    "pipeline_parallel_degree": "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_size stages "
    "pipeline_model_parallel_size pipe_parallel_size num_stages num_pipeline_stages pipeline_stages n_stages",
    "tensor_parallel_degree": "tp tp_size tp_degree tensor_parallel_size tensor_model_parallel_size autotp_size "
    "model_parallel_size mp_size tensor_parallelism",
    "sharded_data_parallel_degree": "sdp dp_shard dp_shard_size dp_shard_degree data_parallel_shard_degree fsdp fsdp2 "
    "fsdp_size fsdp_degree mics_shard_size zero_hpz_partition_size zero3 num_distributed_optimizer_instances",
    "shard_optimizer_state": "zero1 use_distributed_optimizer zero_redundancy_optimizer",
    "microbatches": "mb num_microbatches n_microbatches num_micro_batches micro_batches chunks",
    "active_microbatches": "num_microbatches_with_partial_activation_checkpoints",
    "virtual_pipeline_degree": "v vp vpp vp_size virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size "
    "num_model_chunks num_virtual_stages_per_pipeline_rank pipeline_parallel_layers_per_stage "
    "num_layers_per_virtual_pipeline_stage",
    "pipeline": "schedule pipeline_schedule pipeline_parallel_schedule pp_schedule",
    "activation_checkpointing": "gradient_checkpointing checkpoint_activations activation_checkpoint recompute "
    "recompute_activations activation_checkpointing_policy fsdp_activation_checkpointing use_activation_checkpointing "
    "enable_activation_checkpointing ac_mode recompute_modules remat",
    "offload_activations": "cpu_checkpointing activation_offload activation_offloading cpu_offloading "
    "enable_activation_offload",
    "unit_classes": "auto_wrap_policy transformer_auto_wrap_policy transformer_layer_cls_to_wrap "
    "transformer_cls_names_to_wrap no_split_module_classes no_split_modules module_classes_to_wrap",
    "optimize": "sequence_parallel sp sequence_parallelism enable_sequence_parallel",
    "reduce_dtype": "communication_data_type grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 reduce_precision "
    "grad_reduce_dtype",
    "sdp_gather": "reshard_after_forward",
    "sdp_reduce_bucket_size": "reduce_bucket_size",
    "sdp_max_live_parameters": "stage3_max_live_parameters max_live_parameters prefetch_bucket_size "
    "stage3_prefetch_bucket_size",
    "sdp_param_persistence_threshold": "stage3_param_persistence_threshold param_persistence_threshold",
    "sdp_hierarchical_allgather": "mics_hierarchical_params_gather",
    "delayed_parameter_initialization": "meta_init deferred_init cpu_ram_efficient_loading init_device "
    "low_cpu_mem_usage init_model_with_meta_device init_empty_weights",
    "memory_limit": "max_memory memory_budget gpu_memory_utilization",
    "init_scale": "initial_scale_power initial_loss_scale",
    "scale_window": "loss_scale_window growth_interval",
    "scale_factor": "growth_factor backoff_factor",
    "min_scale": "min_loss_scale",
    "delayed_shift": "hysteresis",
    "state_dict_type": "ckpt_format dist_ckpt_format",
    "async_save": "async_checkpoint async_mode use_async_checkpointing",
    "compile": "torch_compile compile_model",
    "placement_strategy": "rank_order parallelism_order",
    "tensor_parallel": "tp_plan parallelize_plan base_model_tp_plan",
    "broadcast_buffers": "sync_buffers",
}
"""Option: names that others give it, without their prefixes (``fsdp_``, ``megatron_lm_`` ...)."""

NOTES: Final[Mapping[str, str]] = {
    "dp dp_size dp_degree data_parallel_size data_parallel_degree dp_replicate dp_replicate_size replicas num_replicas "
    "data_parallel_replicate_degree dp_replicate_degree": "Leave it out: ranks that pipeline and tensor parallelism "
    "leave over are replicas. Over how many of them parameters are sharded says `sharded_data_parallel_degree`.",
    "zero_stage zero stage zero_optimization sharding_strategy data_parallel_sharding_strategy": "Stage 1 is "
    "`shard_optimizer_state=True`; stage 3, FULL_SHARD or HYBRID_SHARD is `sharded_data_parallel_degree`: how many "
    "ranks hold one copy.",
    "microbatch_size micro_batch_size train_micro_batch_size_per_gpu micro_batch_size_per_gpu": "`microbatches` is a "
    "number, not a size: the batch of the data loader is cut into so many.",
    "batch_size train_batch_size global_batch_size gbs": "The data loader has the batch size; `microbatches` says into "
    "how many parts a step cuts a batch.",
    "gradient_accumulation_steps accumulate_grad_batches": "Accumulation over batches is an argument of the Trainer or "
    "the Accelerator, as ever; `microbatches` says into how many parts a step cuts a batch.",
    "recompute_granularity recompute_method recompute_num_layers": '`activation_checkpointing="all"` recomputes every '
    "unit; with `selective_checkpointing=True` results of matrix products and attention are kept.",
    "cpu_offload offload offload_param offload_params offload_optimizer optimizer_cpu_offload optimizer_offload "
    "zero_offload offload_optimizer_device offload_param_device": "`offload_activations=True` moves activations to the "
    "host; parameters and optimizer state stay on the devices, over which `sharded_data_parallel_degree` shards them.",
    "mixed_precision precision dtype param_dtype torch_dtype fp16_enabled bf16_enabled": "Precision is an argument of "
    "the Trainer or the Accelerator, as ever; without it `bf16=True` or `fp16=True`.",
    "device_map balance split_points split_spec partition_method pipeline_model_parallel_layout layer_split": "Units "
    "are placed automatically. By hand: `auto_partition=False` with `smp_strategy.set_partition`, or `partition_file`.",
    "gradient_clipping clip_grad max_grad_norm clip_grad_norm gradient_clip_val": "Clipping is an argument of the "
    "Trainer or a call of the Accelerator, as ever; `sdp_gradient_clipping` is SageMaker's.",
    "cp cp_size cp_degree context_parallel context_parallel_size context_parallel_degree sp_size "
    "sequence_parallel_size ulysses_sequence_parallel_size": "There is no context parallelism here. With "
    "`tensor_parallel_degree`, "
    '`optimize="memory"` splits activations between blocks along the sequence.',
    "ep ep_size ep_degree expert_parallel expert_model_parallel_size expert_parallel_size expert_parallel_degree "
    "enable_expert_parallel": "There is no expert parallelism here: experts are placed and sharded as other layers.",
    "fp8 fp8_format fp8_recipe float8 enable_fp8": "There is no fp8 here. `bf16=True` is what half precision offers.",
    "find_unused_parameters static_graph gradient_as_bucket_view use_orig_params sync_module_states limit_all_gathers "
    "forward_prefetch backward_prefetch overlap_comm contiguous_gradients overlap_grad_reduce overlap_param_gather "
    "bucket_cap_mb": "Leave it out: that needs no option here.",
    "devices num_nodes num_processes nproc_per_node num_gpus gpus_per_node world_size nnodes": "The launcher or the "
    "Trainer says how many ranks there are.",
    "process_group_timeout ddp_timeout distributed_timeout_minutes": "`SMPStrategy(timeout=...)`, or Accelerate's "
    "`InitProcessGroupKwargs(timeout=...)`.",
    "backend distributed_backend": "`SMPStrategy(process_group_backend=...)`; the path between stages is "
    "`stage_transport`.",
    "layout config recipe": 'A recipe is a word: `Trainer(strategy="smp_pp2_sdp2")`, `smp=pp2_sdp2` in Hydra, '
    "`SMP_CONFIG=pp2_sdp2`.",
}
"""Names for which no option stands alone: what to do instead."""

VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "pipeline": {
        "simple": "gpipe schedulegpipe filldrain afab",
        "1f1b": "schedule1f1b onefoneb pipedream pipedreamflush noninterleaved",
        "1f1b` with `virtual_pipeline_degree=2": "interleaved1f1b scheduleinterleaved1f1b loopedbfs",
        "zb-h1": "zb zerobubble interleavedzerobubble scheduleinterleavedzerobubble",
        "zb-v": "zbvzerobubble schedulezbvzerobubble",
    },
    "activation_checkpointing": {
        "all": "true on yes 1 full uniform block",
        "none": "false off no 0",
        "all` with `selective_checkpointing=True": "selective",
    },
    "optimize": {"speed": "time throughput", "memory": "sequence true"},
    "reduce_dtype": {"float32": "fp32 float true 32", "bfloat16": "bf16", "float16": "fp16 half"},
    "state_dict_type": {"full": "fullstatedict torch", "sharded": "shardedstatedict localstatedict torchdist dcp"},
    "sdp_gather": {"use": "true always", "step": "false never"},
    "stage_transport": {"shared_memory": "shm", "cuda_ipc": "ipc"},
    "trace_device": {"gpu": "cuda"},
    "loss_scale": {"dynamic": "auto true 0"},
    "restore_module": {"all": "true", "none": "false"},
    "placement_strategy": {"cluster": "tpcpepdppp tpcpdppp auto"},
}
"""Option: our word, and words of others for it, in small letters and digits alone."""

_PREFIXES: Final = re.compile(r"^_*(megatron_lm_|parallelism_config_|parallelism_|deepspeed_|fsdp_(?=\w*_))?")


def meant_option(name: str, known: Iterable[str]) -> str | None:
    """Sentence with the option that another library's ``name`` means.

    Args:
        name: unknown here.
        known: names of options, which may be written with hyphens or in capitals.

    Returns:
        ``None`` if no library is known to use this name.
    """
    word = name.lower().replace("-", "_")
    for each in (word, _PREFIXES.sub("", word)):
        if each in known:
            return f"Write `{each}`."
        if option := _option_called(each):
            return f"Write `{option}`."
        for names, note in NOTES.items():
            if each in names.split():
                return note
    return None


def meant_value(option: str, value: object, choices: Iterable[str | None] = ()) -> str | None:
    """Our word for ``value`` of ``option``: another spelling of one of ``choices``, or another library's word."""
    word = re.sub(r"[^a-z0-9]", "", str(value).lower().removeprefix("torch."))
    spelt = next((choice for choice in choices if choice and re.sub(r"[^a-z0-9]", "", choice) == word), None)
    return spelt or next((ours for ours, words in VALUES.get(option, {}).items() if word in words.split()), None)


def _option_called(name: str) -> str | None:
    return next((option for option, names in NAMES.items() if name in names.split()), None)
