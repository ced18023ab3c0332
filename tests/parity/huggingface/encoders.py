"""Encoders that fill in tokens."""

from .architecture import Architecture, family
from .inputs import masked_tokens

__all__ = ["ENCODERS", "REFORMER"]

_WITH_COMMON_SIZES = (
    "AlbertForMaskedLM BertForMaskedLM BigBirdForMaskedLM CamembertForMaskedLM ConvBertForMaskedLM "
    "Data2VecTextForMaskedLM DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM "
    "ErnieForMaskedLM EsmForMaskedLM EsmcForMaskedLM EuroBertForMaskedLM FNetForMaskedLM FlaubertWithLMHeadModel "
    "GteForMaskedLM IBertForMaskedLM JinaEmbeddingsV3ForMaskedLM LayoutLMForMaskedLM "
    "LongformerForMaskedLM MPNetForMaskedLM MegatronBertForMaskedLM MobileBertForMaskedLM "
    "ModernBertForMaskedLM MraForMaskedLM NomicBertForMaskedLM NystromformerForMaskedLM RemBertForMaskedLM "
    "RoFormerForMaskedLM RobertaForMaskedLM RobertaPreLayerNormForMaskedLM "
    "SqueezeBertForMaskedLM TapasForMaskedLM UltrabertForMaskedLM XLMRobertaForMaskedLM XLMRobertaXLForMaskedLM "
    "YosoForMaskedLM"
)

REFORMER = {
    "axial_pos_embds": False,
    "attention_head_size": 8,
    "feed_forward_size": 32,
    "attn_layers": ["local", "lsh", "local", "lsh"],
    "lsh_attn_chunk_length": 4,
    "local_attn_chunk_length": 4,
    "hash_seed": 0,
}

ENCODERS: list[Architecture] = [
    *family("encoder", masked_tokens, _WITH_COMMON_SIZES.split()),
    *family(
        "encoder",
        masked_tokens,
        {
            "FunnelForMaskedLM": {"block_sizes": [2, 1, 1]},
            "LukeForMaskedLM": {"entity_vocab_size": 10, "entity_emb_size": 16},
            "RoCBertForMaskedLM": {
                "pronunciation_vocab_size": 10,
                "pronunciation_embed_dim": 16,
                "shape_vocab_size": 10,
                "shape_embed_dim": 16,
            },
            "XmodForMaskedLM": {"default_language": "en_XX"},
        },
    ),
    *family(
        "encoder",
        masked_tokens,
        {"ReformerForMaskedLM": REFORMER},
        whole=("reformer.encoder",),
        note="its reversible layers are one autograd Function: the encoder is marked as a unit",
    ),
    *family(
        "encoder",
        masked_tokens,
        {"BertForMaskedLM": {"output_attentions": True, "output_hidden_states": True, "attn_implementation": "eager"}},
        loss=lambda output: output.loss + sum(x.pow(2).mean() for x in (*output.attentions, *output.hidden_states)),
        is_in_order=False,
        note="attention maps and hidden states in the loss",
    ),
]
