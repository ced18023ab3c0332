"""Encoder-decoders: text in, text out."""

from .architecture import Architecture, family
from .inputs import translation

__all__ = ["ENCODER_DECODERS"]

ENCODER_DECODERS: list[Architecture] = family(
    "encoder-decoder",
    translation,
    {
        "BartForConditionalGeneration": {},
        "BigBirdPegasusForConditionalGeneration": {},
        "BlenderbotForConditionalGeneration": {},
        "BlenderbotSmallForConditionalGeneration": {},
        "EncoderDecoderModel": {
            "encoder": {"model_type": "bert"},
            "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
        },
        "FSMTForConditionalGeneration": {"src_vocab_size": 64, "tgt_vocab_size": 64},
        "LEDForConditionalGeneration": {"attention_window": 4},
        "LongT5ForConditionalGeneration": {"local_radius": 3, "decoder_start_token_id": 1},
        "M2M100ForConditionalGeneration": {},
        "MBartForConditionalGeneration": {},
        "MT5ForConditionalGeneration": {},
        "MarianMTModel": {},
        "MvpForConditionalGeneration": {},
        "NllbMoeForConditionalGeneration": {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
        "PLBartForConditionalGeneration": {},
        "PegasusForConditionalGeneration": {},
        "PegasusXForConditionalGeneration": {"block_size": 4},
        "ProphetNetForConditionalGeneration": {"num_encoder_layers": 2},
        "SwitchTransformersForConditionalGeneration": {
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "decoder_start_token_id": 1,
        },
        "T5ForConditionalGeneration": {"decoder_start_token_id": 1},
        "T5GemmaForConditionalGeneration": {},
        "UMT5ForConditionalGeneration": {},
    },
)
