"""Vision: transformers and convolutional networks over images."""

from .architecture import Architecture, family
from .inputs import image_class

__all__ = ["VISION"]

VISION: list[Architecture] = [
    *family(
        "vision",
        image_class,
        {
            "BeitForImageClassification": {},
            "BitForImageClassification": {"num_groups": 4, "embedding_size": 8},
            "CLIPForImageClassification": {},
            "ConvNextForImageClassification": {"patch_size": 2},
            "ConvNextV2ForImageClassification": {"patch_size": 2},
            "CvtForImageClassification": {"embed_dim": [8, 16, 24], "depth": [1, 2, 3]},
            "Data2VecVisionForImageClassification": {},
            "DeiTForImageClassification": {},
            "Dinov2ForImageClassification": {},
            "Dinov2WithRegistersForImageClassification": {},
            "DonutSwinForImageClassification": {"patch_size": 1},
            "EfficientNetForImageClassification": {
                "width_coefficient": 0.1,
                "depth_coefficient": 0.3,
                "hidden_dim": 128,
            },
            "FocalNetForImageClassification": {"patch_size": 2},
            "HGNetV2ForImageClassification": {
                "stem_channels": [3, 4, 8],
                "stage_in_channels": [8, 8, 16, 16],
                "stage_mid_channels": [4, 4, 8, 8],
                "stage_out_channels": [8, 16, 16, 32],
                "stage_num_blocks": [1, 1, 1, 1],
                "stage_numb_of_layers": [2, 2, 2, 2],
                "hidden_sizes": [8, 16, 16, 32],
            },
            "HieraForImageClassification": {"patch_stride": [4, 4], "patch_size": [7, 7], "masked_unit_size": [8, 8]},
            "IJepaForImageClassification": {},
            "LevitForImageClassification": {"patch_size": 16},
            "MetaClip2ForImageClassification": {},
            "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25},
            "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25},
            "MobileViTForImageClassification": {"patch_size": 2, "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32]},
            "MobileViTV2ForImageClassification": {"patch_size": 1, "base_attn_unit_dims": [8, 16, 16]},
            "PoolFormerForImageClassification": {},
            "PvtForImageClassification": {},
            "PvtV2ForImageClassification": {},
            "RegNetForImageClassification": {"embedding_size": 8, "groups_width": 8},
            "ResNetForImageClassification": {"embedding_size": 8},
            "SegformerForImageClassification": {},
            "SiglipForImageClassification": {},
            "SwiftFormerForImageClassification": {},
            "SwinForImageClassification": {"patch_size": 1},
            "Swinv2ForImageClassification": {"patch_size": 2},
            "TextNetForImageClassification": {"stem_out_channels": 8},
            "ViTForImageClassification": {},
            "ViTMSNForImageClassification": {},
        },
    ),
]
