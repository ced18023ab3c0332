"""State-space models and linear attention, alone or next to attention."""

from .architecture import Architecture, family
from .inputs import next_tokens

__all__ = ["RECURRENT"]

_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 8}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

RECURRENT: list[Architecture] = [
    *family(
        "recurrent",
        next_tokens,
        {
            "BailingHybridForCausalLM": {"layer_group_size": 2},
            "BambaForCausalLM": {**_MAMBA2, "attn_layer_indices": [1, 3]},
            "FalconH1ForCausalLM": {**_MAMBA2, "mamba_d_ssm": 32},
            "FalconMambaForCausalLM": {},
            "GraniteMoeHybridForCausalLM": {
                **_MAMBA2,
                "layer_types": ["mamba", "attention", "mamba", "attention"],
                "shared_intermediate_size": 16,
            },
            "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
            "KimiLinearForCausalLM": {
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "linear_head_dim": 8,
                "linear_num_heads": 2,
            },
            "Lfm2ForCausalLM": {"block_multiple_of": 16},
            "Lfm3ForCausalLM": {},
            "MambaForCausalLM": {},
            "Mamba2ForCausalLM": {"num_heads": 4, "n_groups": 1, "chunk_size": 8},
            "NemotronHForCausalLM": {
                "layers_block_type": ["mamba", "attention", "mamba", "moe"],
                "mamba_num_heads": 4,
                "mamba_head_dim": 8,
                "ssm_state_size": 4,
                "n_groups": 1,
                "chunk_size": 8,
                "moe_shared_expert_intermediate_size": 16,
            },
            "OlmoHybridForCausalLM": {},
            "Qwen3NextForCausalLM": _DELTA_NET,
            "Qwen3_5ForCausalLM": _DELTA_NET,
            "Qwen3_5MoeForCausalLM": _DELTA_NET,
            "RecurrentGemmaForCausalLM": {},
            "RwkvForCausalLM": {},
            "ZambaForCausalLM": {
                "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
                "mamba_d_state": 4,
            },
            "Zamba2ForCausalLM": {
                "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
                "mamba_d_state": 4,
                "n_mamba_heads": 4,
                "mamba_ngroups": 1,
                "chunk_size": 8,
            },
        },
    ),
]
