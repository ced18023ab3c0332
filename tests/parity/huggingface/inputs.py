"""Random batches made by hand: no tokenizer, no image processor, no hub."""

from typing import Any

import torch
from torch import Tensor

from .tiny import VOCABULARY

__all__ = [
    "Draw",
    "answer",
    "boxes",
    "captions",
    "characters",
    "choice",
    "colours_class",
    "contrastive",
    "decisions",
    "depth",
    "first_and_second",
    "forecast",
    "image_and_text",
    "image_class",
    "image_tokens",
    "masked_images",
    "masked_tokens",
    "masks",
    "next_colours",
    "next_tokens",
    "patches_of_series",
    "small_image",
    "text_class",
    "token_classes",
    "spectrogram_class",
    "spectrogram_text",
    "translation",
    "video_class",
    "waveform_class",
]

LENGTH = 12
# Smaller ids are special tokens in many models.
FIRST_TOKEN = 5
IMAGE_TOKEN, END_OF_TEXT = 4, 2
IMAGE, PATCHES = 32, 16


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


def _text(draw: Draw) -> dict[str, Tensor]:
    mask = draw.padding(LENGTH)
    return {"input_ids": draw.ids(LENGTH).masked_fill(mask == 0, 0), "attention_mask": mask}


def text_class(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text that ends with a special token, and its class."""
    text = _text(draw)
    text["input_ids"][:, -3] = END_OF_TEXT
    return {**text, "labels": draw.classes()}


def token_classes(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text and the class of every token."""
    return {**_text(draw), "labels": draw.classes(LENGTH)}


def answer(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text and where in it the answer stands."""
    return {**_text(draw), "start_positions": draw.classes(high=4), "end_positions": draw.classes(high=LENGTH)}


def choice(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Three texts, and which is right."""
    return {"input_ids": draw.ids(3, LENGTH), "labels": draw.classes(high=3)}


def first_and_second(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text with masked tokens, and whether its second sentence follows the first."""
    return {**_text(draw), "labels": draw.ids(LENGTH), "next_sentence_label": draw.classes()}


def translation(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text in and text out."""
    return {"input_ids": draw.ids(LENGTH), "attention_mask": draw.padding(LENGTH), "labels": draw.ids(LENGTH)}


def image_class(draw: Draw, config: Any) -> dict[str, Tensor]:
    """An image and its class."""
    return {"pixel_values": _pixels(draw), "labels": draw.classes()}


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


def _pixels(draw: Draw) -> Tensor:
    return draw.floats(3, IMAGE, IMAGE)


def contrastive(draw: Draw, config: Any) -> dict[str, Any]:
    """Images and texts that belong together."""
    tokens = draw.ids(LENGTH)
    tokens[:, -1] = END_OF_TEXT
    return {
        "pixel_values": _pixels(draw),
        "input_ids": tokens,
        "attention_mask": draw.padding(LENGTH),
        "return_loss": True,
    }


def image_and_text(draw: Draw, config: Any) -> dict[str, Tensor]:
    """An image, a question, and the answer's class."""
    text = {"input_ids": draw.ids(LENGTH), "attention_mask": draw.padding(LENGTH)}
    if config.model_type == "visual_bert":
        scores = torch.softmax(draw.floats(config.num_labels), dim=-1)
        return {**text, "visual_embeds": draw.floats(6, config.visual_embedding_dim), "labels": scores}
    if config.model_type == "vilt":
        return {**text, "pixel_values": _pixels(draw), "labels": torch.sigmoid(draw.floats(config.num_labels))}
    return {**text, "pixel_values": _pixels(draw), "labels": draw.classes()}


def captions(draw: Draw, config: Any) -> dict[str, Tensor]:
    """An image and its caption."""
    tokens = draw.ids(LENGTH)
    if config.model_type == "pix2struct":
        return {
            "flattened_patches": draw.floats(8, config.vision_config.patch_embed_hidden_size + 2).abs(),
            "labels": tokens,
        }
    text = {} if config.model_type == "vision-encoder-decoder" else {"input_ids": tokens}
    return {"pixel_values": _pixels(draw), "labels": tokens, **text}


def image_tokens(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Text with an image in it, whose patches take the places of special tokens."""
    tokens = torch.cat([draw.ids(2), torch.full((draw.samples, PATCHES), IMAGE_TOKEN), draw.ids(LENGTH)], dim=1)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": _pixels(draw)}
    if config.model_type in ("paligemma", "gemma3"):
        inputs["token_type_ids"] = (tokens == IMAGE_TOKEN).long()
    return {**inputs, "labels": tokens.masked_fill(tokens == IMAGE_TOKEN, -100)}


def boxes(draw: Draw, config: Any) -> dict[str, Any]:
    """Images and what is in them: as many boxes as there happen to be."""
    labels = [
        {"class_labels": torch.arange(1 + number % 2), "boxes": 0.2 + 0.2 * torch.rand(1 + number % 2, 4)}
        for number in range(draw.samples)
    ]
    return {
        "pixel_values": draw.floats(3, 2 * IMAGE, 2 * IMAGE) if config.model_type != "yolos" else _pixels(draw),
        "labels": labels,
    }


def masks(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Images and the class of every pixel."""
    return {"pixel_values": _pixels(draw), "labels": draw.classes(IMAGE, IMAGE)}


def depth(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Images and the distance of every pixel."""
    return {"pixel_values": _pixels(draw), "labels": draw.floats(IMAGE, IMAGE).abs() + 0.1}


def video_class(draw: Draw, config: Any) -> dict[str, Tensor]:
    """A video and its class."""
    return {"pixel_values": draw.floats(4, 3, IMAGE, IMAGE), "labels": draw.classes()}


def masked_images(draw: Draw, config: Any) -> dict[str, Tensor]:
    """An image and which of its patches are hidden."""
    patches = (IMAGE // config.patch_size) ** 2
    return {"pixel_values": _pixels(draw), "bool_masked_pos": draw.classes(patches).bool()}


def small_image(draw: Draw, config: Any) -> dict[str, Tensor]:
    """An image and nothing else."""
    return {"pixel_values": _pixels(draw)}


def forecast(draw: Draw, config: Any) -> dict[str, Tensor]:
    """What has been and what is to come."""
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": draw.floats(past),
        "past_time_features": draw.floats(past, 1),
        "past_observed_mask": torch.ones(draw.samples, past),
        "future_values": draw.floats(future),
        "future_time_features": draw.floats(future, 1),
    }


def patches_of_series(draw: Draw, config: Any) -> dict[str, Tensor]:
    """Several channels of a series."""
    return {"past_values": draw.floats(16, 2), "future_values": draw.floats(4, 2)}


def decisions(draw: Draw, config: Any) -> dict[str, Tensor]:
    """States, actions and what they led to."""
    steps = torch.arange(6).expand(draw.samples, 6).clone()
    return {
        "states": draw.floats(6, 3),
        "actions": draw.floats(6, 2),
        "returns_to_go": draw.floats(6, 1),
        "timesteps": steps,
        "attention_mask": torch.ones(draw.samples, 6),
    }


def next_colours(draw: Draw, config: Any) -> dict[str, Tensor]:
    """An image as a sequence of colours."""
    tokens = draw.ids(LENGTH, high=VOCABULARY - 1)  # the last one begins an image
    return {"input_ids": tokens, "labels": tokens}


def colours_class(draw: Draw, config: Any) -> dict[str, Tensor]:
    """The same, and its class."""
    return {"input_ids": draw.ids(LENGTH), "labels": draw.classes()}
