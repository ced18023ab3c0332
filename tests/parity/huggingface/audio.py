"""Audio: speech in; classes, characters or text out."""

from .architecture import Architecture, family
from .inputs import characters, spectrogram_class, spectrogram_text, waveform_class

__all__ = ["AUDIO"]

_CONVOLUTIONS = {
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "num_codevectors_per_group": 4,
    "codevector_dim": 8,
    "proj_codevector_dim": 8,
}
_SMALL = {"num_hidden_layers": 2, **_CONVOLUTIONS}

AUDIO: list[Architecture] = [
    *family(
        "audio",
        waveform_class,
        {
            "Data2VecAudioForSequenceClassification": {
                **_SMALL,
                "conv_pos_kernel_size": 5,
                "num_conv_pos_embeddings": 2,
            },
            "HubertForSequenceClassification": _SMALL,
            "SEWForSequenceClassification": {**_SMALL, "feat_extract_norm": "layer"},
            "SEWDForSequenceClassification": {**_SMALL, "feat_extract_norm": "layer"},
            "UniSpeechForSequenceClassification": _SMALL,
            "UniSpeechSatForSequenceClassification": _SMALL,
            "Wav2Vec2ForSequenceClassification": _SMALL,
            "Wav2Vec2ConformerForSequenceClassification": _SMALL,
            "WavLMForSequenceClassification": _SMALL,
        },
    ),
    *family("audio", characters, {"HubertForCTC": _SMALL, "Wav2Vec2ForCTC": _SMALL}),
    *family(
        "audio",
        spectrogram_class,
        {
            "ASTForAudioClassification": {"max_length": 32, "num_mel_bins": 16},
            "Wav2Vec2BertForSequenceClassification": {"feature_projection_input_dim": 16, "num_hidden_layers": 2},
        },
    ),
    *family(
        "audio",
        spectrogram_text,
        {
            "WhisperForConditionalGeneration": {"num_mel_bins": 16, "max_source_positions": 16},
            "Speech2TextForConditionalGeneration": {"input_feat_per_channel": 16, "conv_channels": 16},
        },
    ),
]
