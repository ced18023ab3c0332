"""Small models of different kinds, each with its own loss, for comparison with one process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 32


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mlp(self.norm(x)))


class Text(nn.Module):
    """A language model with a parameter in the glue and, if wanted, tied weights."""

    def __init__(self, *, tied: bool = False, dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(8, width))
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(6))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class WeightsInTheGlue(Text):
    """Its output layer is the embedding's weight, used by name, and its loss has an L2 term over all parameters."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden) @ self.embed.weight.T

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().loss(batch) + 1e-3 * penalty


class Skips(nn.Module):
    """Skip connections over all stages, a block used three times, and a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block(16) for _ in range(3))
        self.up = nn.ModuleList(Block(16) for _ in range(3))
        self.shared = Block(16)
        self.out = nn.Linear(16, VOCABULARY)
        self.embed = nn.Embedding(VOCABULARY, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for _ in range(3):
            x = self.shared(x)
        if x.mean() > 0:
            x = x * 2
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(x + skip)
        return self.out(x)

    loss = Text.loss


class Forked(nn.Module):
    """Its two halves are compared by the loss; one of them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.left = nn.ModuleList(Block(16) for _ in range(2))
        self.right = nn.ModuleList(Block(16) for _ in range(2))
        self.left.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch["tokens"])
        with torch.no_grad():
            target = self.left[1](self.left[0](x))
        return (self.right[1](self.right[0](x)) - target).pow(2).mean()


class WithOwnLoss(nn.Module):
    """A Hugging Face model that computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


def gpt2(*, tied: bool = False, dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
    )
    return WithOwnLoss(GPT2LMHeadModel(config))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = 10
    return WithOwnLoss(ViTForImageClassification(config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "text": Text,
    "text, tied": lambda: Text(tied=True),
    "skips": Skips,
    "weights in the glue": WeightsInTheGlue,
    "gpt2": gpt2,
    "gpt2, tied": lambda: gpt2(tied=True),
    "vit": vit,
    "forked": Forked,
}


def batch_for(name: str, step: int, samples: int) -> Any:
    """A batch of random numbers that depend on ``step`` only."""
    generator = torch.Generator().manual_seed(step)
    if name == "vit":
        return {
            "pixel_values": torch.rand(samples, 1, 8, 8, generator=generator),
            "labels": torch.randint(10, (samples,), generator=generator),
        }
    tokens = torch.randint(VOCABULARY, (samples, 8), generator=generator)
    labels = torch.randint(VOCABULARY, (samples, 8), generator=generator)
    return {("input_ids" if "gpt2" in name else "tokens"): tokens, "labels": labels}
