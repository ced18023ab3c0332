"""Public names of SageMaker's model parallel library (version 1, PyTorch), with their arguments and defaults."""

import importlib
import inspect

import pytest

import smp_strategy.smp as smp

# Calls; `...` stands for an argument that has no default.
CALLS = {
    "init": {"config": None},
    "is_initialized": {},
    "is_tracing": {},
    "shutdown": {},
    # In any order: `step` is used with and without arguments.
    "step": {"non_split_inputs": None, "input_split_axes": None, "detach_outputs": True},
    "StepOutput.reduce_mean": {},
    "StepOutput.reduce_sum": {},
    "StepOutput.concat": {},
    "StepOutput.stack": {},
    "DistributedModel": {
        "module": ...,
        "trace_device": "gpu",
        "trace_execution_times": False,
        "overlapping_allreduce": True,
        "backward_passes_per_step": 1,
        "average_grads_across_microbatches": True,
        "bucket_cap_mb": 25,
        "trace_memory_usage": False,
        "broadcast_buffers": True,
        "gradient_as_bucket_view": False,
        "find_unused_parameters": False,
    },
    "DistributedModel.backward": {"tensors": ..., "grad_tensors": None},
    "DistributedModel.local_parameters": {"recurse": True},
    "DistributedModel.local_named_parameters": {"recurse": True},
    "DistributedModel.local_buffers": {"recurse": True},
    "DistributedModel.local_named_buffers": {"recurse": True},
    "DistributedModel.local_modules": {},
    "DistributedModel.local_named_modules": {"memo": None, "prefix": ""},
    "DistributedModel.local_state_dict": {},
    "DistributedModel.state_dict": {"gather_to_rank0": False},
    "DistributedModel.load_state_dict": {"state_dict": ..., "strict": True, "same_partition_load": False},
    "DistributedModel.register_post_partition_hook": {"hook": ...},
    "DistributedModel.register_post_step_hook": {"hook": ...},
    "DistributedModel.register_comm_hook": {"state": ..., "hook": ...},
    "DistributedModel.cpu": {},
    "DistributedModel.join": {},
    "DistributedModel.get_module": {},
    "DistributedModel.virtual_named_parameters": {},
    "DistributedModel.distributed_modules": {},
    "DistributedModel.is_distributed_parameter": {"param": ...},
    "DistributedModel.is_distributed_buffer": {"buf": ...},
    "DistributedModel.is_scaled_batch_parameter": {"param": ...},
    "DistributedModel.is_scaled_batch_buffer": {"buf": ...},
    "DistributedModel.default_reducer_named_parameters": {},
    "DistributedModel.scaled_batch_reducer_named_parameters": {},
    "DistributedOptimizer": {
        "optimizer": ...,
        "static_loss_scale": 1.0,
        "dynamic_loss_scale": False,
        "dynamic_loss_args": None,
    },
    "DistributedOptimizer.step": {"closure": None},
    "DistributedOptimizer.state_dict": {},
    "DistributedOptimizer.load_state_dict": {"state_dict": ...},
    "DistributedOptimizer.local_state_dict": {"gather_if_shard": True},
    "DistributedOptimizer.clip_master_grads": {"max_norm": ...},
    "partition": {"index": ...},
    "set_partition": {"module": ..., "index": ...},
    "tensor_parallelism": {"enabled": True, "tp_config": "**"},
    "set_tensor_parallelism": {"module": ..., "enabled": True, "tp_config": "**"},
    "tp_register": {"dist_module": ..., "init_hook": None, "forward_hook": None, "return_hook": None},
    "tp_register_with_module": {
        "module_cls": ...,
        "dist_module": ...,
        "init_hook": None,
        "forward_hook": None,
        "return_hook": None,
    },
    "model_creation": {"tensor_parallelism": False, "dtype": None, "tp_config": "**"},
    "delay_param_initialization": {"enabled": True},
    "register_parameter": {"module": ..., "param": ...},
    "set_activation_checkpointing": {
        "module": ...,
        "preserve_rng_state": True,
        "pack_args_as_tuple": False,
        "strategy": "each",
    },
    "checkpoint": {"module": ..., "args": "*", "preserve_rng_state": True},
    "patches.checkpoint.checkpoint": {"module": ..., "args": "*", "preserve_rng_state": True},
    "checkpoint_sequential": {
        "sequential": ...,
        "input": ...,
        "strategy": "each",
        "preserve_rng_state": True,
        "pack_args_as_tuple": False,
    },
    "broadcast": {"obj": ..., "group": ...},
    "send": {"obj": ..., "dest": ..., "rank_type": ...},
    "recv_from": {"src": ..., "rank_type": ...},
    "allgather": {"obj": ..., "group": ...},
    "barrier": {"group": smp.WORLD},
    "dp_barrier": {},
    "mp_barrier": {},
    "save": {"obj": ..., "f": ..., "partial": True, "pickle_module": None, "pickle_protocol": 2, "v3": False},
    "load": {
        "f": ...,
        "map_location": None,
        "pickle_module": None,
        "pickle_load_args": None,
        "partial": True,
        "back_compat": False,
    },
    "save_checkpoint": {
        "path": ...,
        "tag": ...,
        "partial": True,
        "model": None,
        "optimizer": None,
        "user_content": None,
        "translate_if_full": True,
        "num_kept_partial_checkpoints": None,
    },
    "resume_from_checkpoint": {
        "path": ...,
        "tag": None,
        "partial": True,
        "strict": True,
        "load_optimizer": True,
        "load_sharded_optimizer_state": True,
        "translate_function": None,
    },
    "amp.GradScaler": {
        "init_scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "enabled": True,
    },
    "optimizers.FusedNovoGrad": {"params": ..., "lr": 1e-3},
    "optimizers.FusedLAMB": {"params": ..., "lr": 1e-3},
    "nn.FusedLayerNorm": {"normalized_shape": ..., "eps": 1e-5, "elementwise_affine": True},
    "nn.DistributedLinear": {"in_features": ..., "out_features": ...},
    "nn.DistributedEmbedding": {
        "num_embeddings": ...,
        "embedding_dim": ...,
        "padding_idx": None,
        "max_norm": None,
        "norm_type": 2.0,
        "scale_grad_by_freq": False,
        "sparse": False,
        "_weight": None,
        "initializer_range": 0.02,
        "_skip_allgather": False,
        "_skip_scatter_and_merge": False,
    },
    "nn.DistributedTransformerLMHead": {
        "num_layers": 12,
        "num_attention_heads": 32,
        "attention_head_size": 32,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "vocab_size": 30522,
        "num_positions": 1024,
        "attention_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
        "activation": "gelu",
        "layernorm_epsilon": 1e-5,
        "num_token_types": 0,
        "causal_mask_size": None,
        "add_cross_attention": False,
        "add_lm_head": True,
        "initializer_range": 0.02,
        "use_normal_initialization": False,
        "pre_layernorm": False,
        "post_layernorm": True,
    },
    "nn.DistributedTransformer": {"num_layers": 12, "options": "**"},
    "nn.DistributedTransformerLayer": {
        "num_attention_heads": 32,
        "attention_head_size": 32,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "attention_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
        "activation": "gelu",
        "layernorm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "use_normal_initialization": False,
        "causal_mask_size": None,
        "add_cross_attention": False,
        "pre_layernorm": False,
        "post_layernorm": True,
        "use_alibi": False,
        "alibi_bias_max": 8,
    },
    "nn.DistributedAttentionLayer": {
        "num_attention_heads": 32,
        "attention_head_size": 32,
        "hidden_size": 1024,
        "attention_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
        "layernorm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "use_normal_initialization": False,
        "cross_attention": False,
        "causal_mask_size": None,
        "pre_layernorm": False,
        "post_layernorm": True,
    },
    "nn.DistributedTransformerOutputLayer": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "hidden_dropout_prob": 0.1,
        "activation": "gelu",
        "layernorm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "use_normal_initialization": False,
        "pre_layernorm": False,
        "post_layernorm": True,
        "fp32_residual_addition": False,
    },
    "nn.FlashAttentionLayer": {
        "attention_dropout_prob": 0.1,
        "attention_head_size": None,
        "scale_attention_scores": True,
        "scale_attn_by_layer_idx": False,
        "layer_idx": None,
        "scale": None,
        "triton_flash_attention": False,
        "use_alibi": False,
    },
    **{f"{kind}{what}": {} for kind in ("", "local_", "pp_", "tp_", "rdp_", "dp_", "mp_") for what in ("rank", "size")},
    **{f"get_{kind}_process_group": {} for kind in ("world", "pp", "tp", "rdp", "dp", "mp")},
    **{f"get_{kind}_group": {} for kind in ("mp", "dp", "tp")},
    **{
        f"nn.huggingface.{family}.translate_{name}": {"state_dict": ..., "max_seq_len": None}
        for family in ("gpt2", "bert", "roberta", "gptj", "gptneo", "gptneox", "t5")
        for name in (f"state_dict_to_hf_{family}", f"hf_state_dict_to_smdistributed_{family}")
    },
    **{
        f"nn.huggingface.{family}.get_hf_{family}_{layer}_hooks": {}
        for family, layer in (
            *(("gpt2", "transformer_layer"), ("gpt2", "transformer_lm_head"), ("gptneo", "transformer_lm_head")),
            *(
                ("bert", "transformer"),
                ("roberta", "transformer"),
                ("gptj", "transformer"),
                ("t5", "transformer_layer"),
            ),
        )
    },
}
VALUES = [
    *("WORLD", "MP_GROUP", "DP_GROUP", "TP_GROUP", "PP_GROUP", "RDP_GROUP"),
    *("WORLD_RANK", "MP_RANK", "DP_RANK", "TP_RANK", "PP_RANK", "RDP_RANK"),
    *(f"CommGroup.{name}" for name in ("WORLD", "MP_GROUP", "DP_GROUP", "TP_GROUP", "PP_GROUP", "RDP_GROUP")),
    *(f"RankType.{name}" for name in ("WORLD_RANK", "MP_RANK", "DP_RANK", "TP_RANK", "PP_RANK", "RDP_RANK")),
    *("StepOutput.outputs", "DistributedModel.partitioned", "DistributedOptimizer.overflow", "state.cfg"),
]
MODULES = ["amp", "nn", "nn.huggingface.gpt2", "optimizers", "patches.checkpoint"]


def found(name):
    thing = smp
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("name", CALLS)
def test_a_call_takes_sagemakers_arguments(name):
    parameters = dict(inspect.signature(found(name)).parameters)
    is_method = name.split(".")[0] in ("StepOutput", "DistributedModel", "DistributedOptimizer") and "." in name
    if is_method:
        del parameters["self"]
    if name == "step":
        del parameters["func"]
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    own = {
        each: kinds.get(parameter.kind, ... if parameter.default is parameter.empty else parameter.default)
        for each, parameter in parameters.items()
    }
    expected = CALLS[name]
    assert list(own)[: len(expected)] == list(expected)
    assert {each: own[each] for each in expected} == expected
    # Arguments of our own come after SageMaker's, and may be left out.
    assert all(own[each] is not ... for each in own if each not in expected)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_there(name):
    if name != "state.cfg":
        assert found(name) is not None
    assert hasattr(smp.state, "cfg")


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_imported(name):
    assert importlib.import_module(f"smp_strategy.smp.{name}") is found(name)


def test_all_public_names_are_exported():
    tops = {name.split(".")[0] for name in (*CALLS, *VALUES)}
    assert tops <= set(smp.__all__)
