"""Vision beyond classes: boxes, masks, depth, videos, masked images."""

from .architecture import Architecture, family
from .inputs import boxes, depth, masked_images, masks, small_image, video_class

__all__ = ["SCENES"]

_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "out_features": ["stage4"],
}
_PYRAMID = {"model_type": "resnet", "embedding_size": 8, "out_features": ["stage2", "stage3", "stage4"]}
_ALL_STAGES = {
    "model_type": "swin",
    "patch_size": 1,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_DETR = {"backbone_config": _RESNET, "num_queries": 5, "use_timm_backbone": False, "use_pretrained_backbone": False}
_VIDEO = {"num_frames": 4, "tubelet_size": 2, "decoder_num_hidden_layers": 2}

SCENES: list[Architecture] = [
    *family(
        "scenes",
        boxes,
        {
            "DeformableDetrForObjectDetection": {
                **_DETR,
                "backbone_config": _PYRAMID,
                "num_feature_levels": 3,
                "d_model": 32,
                "with_box_refine": True,
            },
            "ConditionalDetrForObjectDetection": _DETR,
            "DetrForObjectDetection": _DETR,
            "TableTransformerForObjectDetection": _DETR,
            "YolosForObjectDetection": {"num_detection_tokens": 5, "image_size": [32, 32]},
            "RTDetrForObjectDetection": {
                "backbone_config": {"model_type": "rt_detr_resnet", "out_features": ["stage2", "stage3", "stage4"]},
                "encoder_hidden_dim": 16,
                "encoder_in_channels": [16, 24, 32],
                "decoder_in_channels": [16, 16, 16],
                "num_queries": 5,
                "num_denoising": 0,
                "encoder_layers": 1,
            },
        },
    ),
    *family(
        "scenes",
        masks,
        {
            "BeitForSemanticSegmentation": {"out_indices": [0, 1, 2, 3], "pool_scales": [1, 2]},
            "Data2VecVisionForSemanticSegmentation": {"out_indices": [0, 1, 2, 3], "pool_scales": [1, 2]},
            "MobileNetV2ForSemanticSegmentation": {"depth_multiplier": 0.25},
            "MobileViTForSemanticSegmentation": {"patch_size": 2, "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32]},
            "SegformerForSemanticSegmentation": {"decoder_hidden_size": 16},
            "UperNetForSemanticSegmentation": {
                "backbone_config": _ALL_STAGES,
                "pool_scales": [1, 2],
                "auxiliary_in_channels": 32,
                "auxiliary_channels": 8,
            },
        },
    ),
    *family(
        "scenes",
        depth,
        {
            "GLPNForDepthEstimation": {"decoder_hidden_size": 16},
        },
    ),
    *family(
        "scenes",
        video_class,
        {
            "TimesformerForVideoClassification": {"num_frames": 4},
            "VideoMAEForVideoClassification": _VIDEO,
            "VivitForVideoClassification": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
        },
    ),
    *family(
        "scenes",
        masked_images,
        {
            "SwinForMaskedImageModeling": {"patch_size": 2, "window_size": 2, "encoder_stride": 16},
            "ViTForMaskedImageModeling": {"encoder_stride": 8},
            "DeiTForMaskedImageModeling": {"encoder_stride": 8},
        },
    ),
    *family(
        "scenes",
        masks,
        {
            "DPTForSemanticSegmentation": {
                "backbone_out_indices": [0, 1, 2, 3],
                "neck_hidden_sizes": [8, 8, 16, 16],
                "fusion_hidden_size": 8,
            }
        },
        is_random=True,
        is_in_order=False,
        note="has dropout whatever its configuration says: against one stage",
    ),
    *family(
        "scenes",
        small_image,
        {
            "ViTMAEForPreTraining": {
                "decoder_hidden_size": 32,
                "decoder_intermediate_size": 64,
                "decoder_num_hidden_layers": 2,
            }
        },
        is_random=True,
        note="masks patches at random: against one stage",
    ),
]
