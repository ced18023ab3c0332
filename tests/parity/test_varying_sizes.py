"""Batches of ever new sizes have the numbers of one process on any number of stages."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chunks import chunked
from .compare import Block, Case, check
from .layers import VOCABULARY, WIDTH, Encoder
from .models import gpt2

# The first two give a formula for all others. With the fifth, another branch is taken; then the batch is a smaller one.
LENGTHS = (10, 12, 9, 14, 24, 13, 11, 30, 15)
SAMPLES = (8, 8, 8, 8, 8, 4, 8, 8, 4)
STEPS = len(LENGTHS)


def tokens_of(generator: torch.Generator) -> Tensor:
    """Tokens of the size of a step, whose number is the generator's seed."""
    step = generator.initial_seed()
    return torch.randint(2, VOCABULARY, (SAMPLES[step], LENGTHS[step]), generator=generator)


class Language(nn.Module):
    """GPT-2 of Transformers, on padded batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gpt2().model
        self.net.resize_token_embeddings(VOCABULARY)
        self.net.transformer.wpe = nn.Embedding(32, 16)

    def loss(self, batch: Any) -> Tensor:
        return self.net(**batch).loss

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        tokens = tokens_of(generator)
        mask = (torch.arange(tokens.shape[1]) < tokens.shape[1] - torch.arange(len(tokens))[:, None]).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


class Branching(nn.Module):
    """Pools long sequences in between, and slices and reshapes between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Encoder() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and x.shape[1] > 20:
                x, tokens = F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2), tokens[:, ::2]
        samples, length, _ = x.shape
        logits = self.head(x[:, : length - 1]).reshape(samples * (length - 1), -1)
        return F.cross_entropy(logits, tokens[:, 1:].reshape(-1))

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"tokens": tokens_of(generator)}


class Images(nn.Module):
    """Convolutions that halve images of any size, rounding down."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 4, 4, 8)
        self.stem = nn.ModuleList(
            nn.Sequential(nn.Conv2d(one, other, 3, stride=2, padding=1), nn.ReLU())
            for one, other in zip(widths, widths[1:], strict=False)
        )
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def loss(self, batch: Any) -> Tensor:
        x = batch["images"]
        for layer in self.stem:
            x = layer(x)
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return (x.mean(1) - batch["targets"]).square().mean()

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        step = generator.initial_seed()
        size = (SAMPLES[step], 1, 2 * LENGTHS[step], LENGTHS[step] + 3)
        return {"images": torch.rand(size, generator=generator), "targets": torch.rand(size[0], 8, generator=generator)}


# Padded tokens have no loss; the reference adds up microbatches by their samples.
BY_SAMPLES = {"loss_weighting": "samples"}
CASES = {each.__name__: Case(each, steps=STEPS, options=BY_SAMPLES) for each in (Language, Branching, Images)}


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_new_sizes_have_the_numbers_of_one_process(name, pp):
    check(CASES[name], pp, (2,))


@pytest.mark.dear
@pytest.mark.parametrize("name", CASES)
def test_new_sizes_in_chunks(name):
    check(CASES[name], 2, (4,), chunked, ([0, 1, 0, 1], None))
