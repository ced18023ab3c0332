"""Encoders that fill in tokens."""

from .architecture import Architecture, family
from .inputs import masked_tokens

__all__ = ["ENCODERS"]

_WITH_COMMON_SIZES = (
    "AlbertForMaskedLM BertForMaskedLM BigBirdForMaskedLM CamembertForMaskedLM ConvBertForMaskedLM "
    "Data2VecTextForMaskedLM DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM "
    "ErnieForMaskedLM EsmForMaskedLM EsmcForMaskedLM EuroBertForMaskedLM FNetForMaskedLM FlaubertWithLMHeadModel "
    "FunnelForMaskedLM GteForMaskedLM IBertForMaskedLM JinaEmbeddingsV3ForMaskedLM LayoutLMForMaskedLM "
    "LongformerForMaskedLM LukeForMaskedLM MPNetForMaskedLM MegatronBertForMaskedLM MobileBertForMaskedLM "
    "ModernBertForMaskedLM MraForMaskedLM NomicBertForMaskedLM NystromformerForMaskedLM RemBertForMaskedLM "
    "RoCBertForMaskedLM RoFormerForMaskedLM RobertaForMaskedLM RobertaPreLayerNormForMaskedLM "
    "SqueezeBertForMaskedLM TapasForMaskedLM UltrabertForMaskedLM XLMRobertaForMaskedLM XLMRobertaXLForMaskedLM "
    "YosoForMaskedLM"
)

ENCODERS: list[Architecture] = [
    *family("encoder", masked_tokens, _WITH_COMMON_SIZES.split()),
    *family(
        "encoder",
        masked_tokens,
        {
            "ReformerForMaskedLM": {"axial_pos_embds": False, "attention_head_size": 8, "feed_forward_size": 32},
            "XmodForMaskedLM": {"default_language": "en_XX"},
        },
    ),
]
