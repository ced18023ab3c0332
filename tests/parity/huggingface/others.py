"""Architectures with inputs of their own: pages, masks of objects, latents, codecs."""

from typing import Any

import torch
from torch import Tensor

from .architecture import Architecture, family
from .inputs import Draw, captions

__all__ = ["OTHERS"]

_SWIN = {"model_type": "swin", "patch_size": 1, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
# Their normalization has groups of 32 channels.
_WIDE = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32}


def objects(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Images, and the mask and class of each object in them."""
    masks, classes = draw.classes(2, 32, 32).float(), torch.tensor([0, 1]).expand(draw.samples, 2)
    return {"pixel_values": draw.floats(3, 32, 32), "mask_labels": masks, "class_labels": classes.clone()}


def page(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Words and where they stand on the page."""
    corners, _ = draw.ids(12, 4, high=100, low=0).sort(dim=-1)
    return {"input_ids": draw.ids(12), "bbox": corners, "labels": draw.classes(12)}


def regions(draw: Draw, config: Any) -> dict[str, Tensor]:
    """A question about regions of an image."""
    features = {"visual_feats": draw.floats(5, config.visual_feat_dim), "visual_pos": draw.floats(5, 4)}
    return {"input_ids": draw.ids(12), **features, "labels": draw.classes(high=config.num_qa_labels)}


def text_or_anything(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text under a name that leaves open what it is."""
    return {"inputs": draw.ids(12), "attention_mask": draw.padding(12), "labels": draw.classes()}


def image_beside_text(draw: Draw, config: Any) -> dict[str, Tensor]:
    """An image and a text."""
    return {"input_ids": draw.ids(12), "pixel_values": draw.floats(3, 32, 32)}


def waveform(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Sound alone."""
    return {"input_values": draw.floats(1, 640) if config.model_type == "encodec" else draw.floats(400)}


def words(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text for a model that could also see."""
    tokens = draw.ids(12)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


OTHERS: list[Architecture] = [
    *family(
        "others",
        objects,
        {
            "Mask2FormerForUniversalSegmentation": {
                **_WIDE,
                "backbone_config": _SWIN,
                "num_queries": 5,
                "encoder_feedforward_dim": 16,
                "dim_feedforward": 16,
                "train_num_points": 16,
            },
        },
        is_random=True,
        is_in_order=False,
        note="compares masks at random points: against one stage",
    ),
    *family(
        "others",
        objects,
        {
            "MaskFormerForInstanceSegmentation": {
                "backbone_config": _SWIN,
                "decoder_config": {
                    "model_type": "detr",
                    "d_model": 16,
                    "encoder_layers": 1,
                    "decoder_layers": 2,
                    "encoder_attention_heads": 2,
                    "decoder_attention_heads": 2,
                    "encoder_ffn_dim": 16,
                    "decoder_ffn_dim": 16,
                    "num_queries": 5,
                },
                "fpn_feature_size": 32,
                "mask_feature_size": 32,
            },
        },
    ),
    *family("others", page, ["LayoutLMForTokenClassification"]),
    *family(
        "others",
        regions,
        {"LxmertForQuestionAnswering": {"l_layers": 2, "x_layers": 2, "r_layers": 2, "num_qa_labels": 10}},
    ),
    *family(
        "others",
        text_or_anything,
        {
            "PerceiverForSequenceClassification": {
                "num_latents": 4,
                "d_latents": 16,
                "num_self_attends_per_block": 2,
                "num_self_attention_heads": 2,
                "num_cross_attention_heads": 2,
            }
        },
    ),
    *family(
        "others",
        image_beside_text,
        ["FlavaModel"],
        loss=lambda output: output.multimodal_output.last_hidden_state.pow(2).mean(),
    ),
    *family(
        "others",
        waveform,
        {
            "EncodecModel": {
                "num_filters": 4,
                "codebook_size": 8,
                "codebook_dim": 16,
                "upsampling_ratios": [4, 2],
                "num_lstm_layers": 1,
            }
        },
        loss=lambda output: output.audio_values.pow(2).mean(),
    ),
    *family(
        "others",
        captions,
        {
            "Blip2ForConditionalGeneration": {
                "text_config": {"model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 2},
                "vision_config": {"num_hidden_layers": 2},
                "qformer_config": {"num_hidden_layers": 2, "encoder_hidden_size": 16},
                "num_query_tokens": 4,
                "image_token_index": 4,
            }
        },
    ),
    *family(
        "others",
        words,
        {
            "Qwen2VLForConditionalGeneration": {
                "text_config": {
                    "num_hidden_layers": 2,
                    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
                },
                "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2},
            }
        },
        note="text only",
    ),
]
