"""What several of the networks are made of."""

import torch
from torch import Tensor, nn

from .compare import SAMPLES

__all__ = ["VOCABULARY", "WIDTH", "Encoder", "tokens_of"]

VOCABULARY = 16
WIDTH = 8
LENGTH = 6


def tokens_of(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (SAMPLES, length), generator=generator)


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
