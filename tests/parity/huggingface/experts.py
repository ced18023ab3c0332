"""Mixtures of experts: how many tokens an expert gets depends on values."""

from .architecture import Architecture, family
from .inputs import next_tokens

__all__ = ["EXPERTS"]

_DEEPSEEK_INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}

EXPERTS: list[Architecture] = [
    *family(
        "experts",
        next_tokens,
        {
            "AXK1ForCausalLM": {},
            "AXK2ForCausalLM": {},
            "AfmoeForCausalLM": {},
            "AriaTextForCausalLM": {"moe_num_experts": 4},
            "Cohere2MoeForCausalLM": {},
            "DbrxForCausalLM": {
                "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
                "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
                "max_seq_len": 64,
                "n_layers": 2,
            },
            "DeepseekV2ForCausalLM": {},
            "DeepseekV3ForCausalLM": {},
            "DeepseekV32ForCausalLM": _DEEPSEEK_INDEXER,
            "Dots1ForCausalLM": {"n_shared_experts": 1},
            "Ernie4_5_MoeForCausalLM": {},
            "ExaoneMoeForCausalLM": {},
            "FlexOlmoForCausalLM": {},
            "FlintForCausalLM": {},
            "BeamForCausalLM": {},
            "Glm4MoeForCausalLM": {},
            "Glm4MoeLiteForCausalLM": {},
            "GlmMoeDsaForCausalLM": _DEEPSEEK_INDEXER,
            "GptOssForCausalLM": {},
            "GraniteMoeForCausalLM": {},
            "GraniteMoeSWAForCausalLM": {},
            "GraniteMoeSharedForCausalLM": {"shared_intermediate_size": 16},
            "HYV3ForCausalLM": {},
            "HunYuanMoEV1ForCausalLM": {},
            "JetMoeForCausalLM": {"num_local_experts": 4},
            "Kolibri1ForCausalLM": {},
            "LagunaForCausalLM": {},
            "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
            "Llama4ForCausalLM": {},
            "LongcatFlashForCausalLM": {"head_dim": 4},
            "MellumForCausalLM": {},
            "MiniMaxForCausalLM": {},
            "MiniMaxM2ForCausalLM": {},
            "MixtralForCausalLM": {},
            "OlmoeForCausalLM": {},
            "PhimoeForCausalLM": {},
            "Qwen2MoeForCausalLM": {},
            "Qwen3MoeForCausalLM": {},
            "SolarOpenForCausalLM": {},
            "ZayaForCausalLM": {"num_experts_per_tok": 1, "router_hidden_size": 8},
        },
    ),
    *family("experts", next_tokens, {"MixtralForCausalLM": {"output_router_logits": True}}, note="with router loss"),
]
