"""Random batches made by hand: no tokenizer, no image processor, no hub."""

from typing import Any

import torch
from torch import Tensor

from .tiny import VOCABULARY

__all__ = [
    "Draw",
    "characters",
    "image_class",
    "masked_tokens",
    "next_tokens",
    "spectrogram_class",
    "spectrogram_text",
    "translation",
    "waveform_class",
]

LENGTH = 12
# Smaller ids are special tokens in many models.
FIRST_TOKEN = 5


class Draw:
    """A source of random inputs for ``samples`` samples, always the same."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._generator = torch.Generator().manual_seed(0)

    def ids(self, *size: int, high: int = VOCABULARY, low: int = FIRST_TOKEN) -> Tensor:
        """Integers in ``[low, high)``."""
        return torch.randint(low, high, (self.samples, *size), generator=self._generator)

    def classes(self, *size: int, high: int = 2) -> Tensor:
        """Integers in ``[0, high)``."""
        return self.ids(*size, high=high, low=0)

    def floats(self, *size: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(self.samples, *size, generator=self._generator)

    def padding(self, length: int) -> Tensor:
        """A mask whose last sample is two tokens short."""
        mask = torch.ones(self.samples, length, dtype=torch.long)
        mask[-1, -2:] = 0
        return mask


def next_tokens(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text for a decoder."""
    tokens, mask = draw.ids(LENGTH), draw.padding(LENGTH)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def masked_tokens(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text for an encoder, which is asked for tokens that it may see."""
    return next_tokens(draw, config)


def translation(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text in and text out."""
    return {"input_ids": draw.ids(LENGTH), "attention_mask": draw.padding(LENGTH), "labels": draw.ids(LENGTH)}


def image_class(draw: Draw, config: Any) -> dict[str, Tensor]:
    """An image and its class."""
    return {"pixel_values": draw.floats(3, 32, 32), "labels": draw.classes()}


def waveform_class(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Sound and its class."""
    return {"input_values": draw.floats(400), "labels": draw.classes()}


def characters(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Sound and the characters spoken."""
    return {"input_values": draw.floats(400), "labels": draw.ids(4)}


def spectrogram_class(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Sound as a spectrogram and its class."""
    name = "input_values" if config.model_type == "audio-spectrogram-transformer" else "input_features"
    return {name: draw.floats(32, 16), "labels": draw.classes()}


def spectrogram_text(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Sound as a spectrogram and what is said."""
    features = draw.floats(32, 16)
    return {"input_features": features.mT if config.model_type == "whisper" else features, "labels": draw.ids(8)}
