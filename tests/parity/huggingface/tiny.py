"""Tiny configurations of any Hugging Face architecture.

Their config classes share most names (``hidden_size``, ``num_hidden_layers``), so one list of sizes shrinks nearly all
of them; what it does not fit is said per architecture. Nothing may be random while the models are compared, so every
probability of dropping or masking something is zero.
"""

import inspect
from typing import Any

import transformers
from transformers import PreTrainedConfig

__all__ = ["VOCABULARY", "tiny_config"]

VOCABULARY = 64

_SIZES: dict[str, Any] = {
    # Transformers in general
    **{"hidden_size": 16, "d_model": 16, "embedding_size": 16, "intermediate_size": 32, "d_ff": 32},
    **{"num_hidden_layers": 4, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_heads": 2, "head_dim": 8, "d_kv": 8},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    # Text
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 64, "type_vocab_size": 2, "sliding_window": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    # Mixtures of experts and compressed attention
    **{"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"first_k_dense_replace": 1, "state_size": 4},
    # Images and sound
    **{"image_size": 32, "patch_size": 8, "projection_dim": 16, "embed_dim": 8, "window_size": 4},
}
# Where an architecture has one number per level, these are the first ones.
_LEVELS: dict[str, tuple[int, ...]] = {
    "hidden_sizes": (8, 16, 24, 32, 40),
    "embed_dim": (8, 16, 24, 32, 40),
    "depths": (1, 2, 1, 1, 1),
    "depth": (1, 2, 1, 1, 1),
    "num_heads": (1, 2, 2, 2, 2),
    "num_attention_heads": (1, 2, 2, 2, 2),
    "key_dim": (8, 8, 8, 8, 8),
}
_RANDOM = ("drop", "jitter", "mask_time_prob", "mask_feature_prob", "apply_spec_augment")


def tiny_config(kind: type[PreTrainedConfig], **options: Any) -> PreTrainedConfig:
    """A tiny configuration without randomness.

    Args:
        kind: its class.
        options: what differs from the common sizes; dicts for the parts of a composite configuration, which may name
            the ``model_type`` of that part.
    """
    config = _shrunk(kind, options)
    _make_deterministic(config)
    return config


def _shrunk(kind: type[PreTrainedConfig], options: dict[str, Any]) -> PreTrainedConfig:
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind.__init__).parameters.items()}
    real_name = kind.attribute_map
    values: dict[str, Any] = {}
    for name in {**_SIZES, **_LEVELS}:
        default = defaults.get(real_name.get(name, name), inspect.Parameter.empty)
        if isinstance(default, list | tuple):
            values[real_name.get(name, name)] = list(_LEVELS.get(name, [_SIZES.get(name)] * 9)[: len(default)])
        elif name in _SIZES and default is not inspect.Parameter.empty:
            values[real_name.get(name, name)] = _SIZES[name]
    for name, part in kind.sub_configs.items():
        given = dict(options.get(name) or {})
        model_type = given.pop("model_type", None)
        if model_type is not None:
            part = transformers.CONFIG_MAPPING[model_type]
        if part is not transformers.AutoConfig:
            values[name] = _shrunk(part, given)
    values.update({real_name.get(name, name): value for name, value in options.items() if name not in kind.sub_configs})
    return kind(**values)


def _make_deterministic(config: PreTrainedConfig) -> None:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _make_deterministic(value)
        elif not any(word in name for word in _RANDOM) or value is None:
            continue
        elif isinstance(value, bool):
            setattr(config, name, False)
        elif isinstance(value, int | float):
            setattr(config, name, type(value)(0))
        elif isinstance(value, list | tuple):
            setattr(config, name, type(value)(0.0 for _ in value))
