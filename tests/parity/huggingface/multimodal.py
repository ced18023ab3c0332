"""Multimodal: images with text."""

from .architecture import Architecture, family
from .inputs import captions, contrastive, image_and_text, image_tokens

__all__ = ["MULTIMODAL"]

_TOWERS = {
    "text_config": {"num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": {"num_hidden_layers": 2},
}
_LLAMA = {"model_type": "llama", "num_hidden_layers": 2}
_CLIP = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
_SIGLIP = {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}

MULTIMODAL: list[Architecture] = [
    *family(
        "multimodal",
        contrastive,
        {
            "AltCLIPModel": _TOWERS,
            "BlipModel": _TOWERS,
            "CLIPModel": _TOWERS,
            "CLIPSegModel": _TOWERS,
            "ChineseCLIPModel": _TOWERS,
            "MetaClip2Model": _TOWERS,
            "OwlViTModel": _TOWERS,
            "Owlv2Model": _TOWERS,
            "SiglipModel": _TOWERS,
            "VisionTextDualEncoderModel": {
                "text_config": {"model_type": "bert", "num_hidden_layers": 2},
                "vision_config": {"model_type": "vit", "num_hidden_layers": 2},
            },
        },
    ),
    *family(
        "multimodal",
        image_and_text,
        {
            "VisualBertForQuestionAnswering": {},
        },
    ),
    *family(
        "multimodal",
        captions,
        {
            "BlipForConditionalGeneration": _TOWERS,
            "GitForCausalLM": {"vision_config": {"num_hidden_layers": 2}},
            "VisionEncoderDecoderModel": {
                "encoder": {"model_type": "vit"},
                "decoder": {"model_type": "gpt2", "add_cross_attention": True},
                "decoder_start_token_id": 1,
                "pad_token_id": 0,
            },
            "Pix2StructForConditionalGeneration": {},
        },
    ),
    *family(
        "multimodal",
        image_tokens,
        {
            "LlavaForConditionalGeneration": {
                "text_config": _LLAMA,
                "vision_config": _CLIP,
                "image_token_index": 4,
                "image_token_id": 4,
            },
            "VipLlavaForConditionalGeneration": {
                "text_config": _LLAMA,
                "vision_config": _CLIP,
                "image_token_index": 4,
                "image_token_id": 4,
                "vision_feature_layers": [-1, -2],
            },
            "PaliGemmaForConditionalGeneration": {
                "text_config": {"model_type": "gemma", "num_hidden_layers": 2},
                "vision_config": _SIGLIP,
                "image_token_index": 4,
                "image_token_id": 4,
            },
            "AyaVisionForConditionalGeneration": {
                "text_config": {"model_type": "cohere2", "num_hidden_layers": 2},
                "vision_config": _SIGLIP,
                "image_token_index": 4,
                "image_token_id": 4,
                "downsample_factor": 1,
            },
            "Gemma3ForConditionalGeneration": {
                "text_config": {"num_hidden_layers": 2},
                "vision_config": _SIGLIP,
                "image_token_index": 4,
                "image_token_id": 4,
                "mm_tokens_per_image": 16,
            },
            "InternVLForConditionalGeneration": {
                "text_config": {"model_type": "qwen2", "num_hidden_layers": 2},
                "vision_config": {"num_hidden_layers": 2, "image_size": [32, 32], "patch_size": [8, 8]},
                "image_token_id": 4,
                "downsample_ratio": 1.0,
            },
        },
    ),
    *family(
        "multimodal", contrastive, {"GroupViTModel": _TOWERS}, is_random=True, note="draws noise: against one stage"
    ),
    *family(
        "multimodal",
        image_and_text,
        ["ViltForQuestionAnswering"],
        is_random=True,
        note="draws patches: against one stage",
    ),
]
