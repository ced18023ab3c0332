"""Time series, decisions and other sequences that are no text."""

from .architecture import Architecture, family
from .inputs import colours_class, decisions, forecast, next_colours, patches_of_series

__all__ = ["SERIES"]

_FORECAST = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "input_size": 1,
    "num_time_features": 1,
}
_PATCHES = {"num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4}

SERIES: list[Architecture] = [
    *family(
        "series",
        forecast,
        {
            "AutoformerForPrediction": {**_FORECAST, "label_length": 4, "moving_average": 3},
            "TimeSeriesTransformerForPrediction": _FORECAST,
        },
    ),
    *family(
        "series",
        forecast,
        {"InformerForPrediction": _FORECAST},
        is_random=True,
        note="samples what it attends to: against one stage",
    ),
    *family(
        "series",
        patches_of_series,
        {"PatchTSTForPrediction": _PATCHES, "PatchTSMixerForPrediction": _PATCHES},
    ),
    *family(
        "series",
        decisions,
        {"DecisionTransformerModel": {"state_dim": 3, "act_dim": 2, "n_layer": 4, "n_head": 2, "max_ep_len": 32}},
        loss=lambda output: output.action_preds.pow(2).mean() + output.return_preds.pow(2).mean(),
    ),
    *family("series", next_colours, ["ImageGPTForCausalImageModeling"]),
    *family("series", colours_class, ["ImageGPTForImageClassification"]),
]
