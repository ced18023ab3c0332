"""The GPT that these scripts train, and what a step of it costs. Plain PyTorch, with nothing but torch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "Shape"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a GPT and of what it reads."""

    layers: int
    width: int
    heads: int
    length: int
    """Tokens of a sample."""
    vocabulary: int = 256

    def flops(self, parameters: int, tokens: int) -> float:
        """Of forward and backward: two and four per weight and token, and causal attention, which is half a square."""
        return 6.0 * parameters * tokens + 6.0 * self.layers * self.width * self.length * tokens

    def batch(self, samples: int, device: torch.device, seed: int = 0) -> Tensor:
        """Random tokens, one more per sample than are read: targets are the next ones."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocabulary, (samples, self.length + 1), generator=generator).to(device)


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is batch x time x width."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens in, the mean loss over the next ones out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, batch x time x vocabulary."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        """Of all but the first token of each of ``windows``."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
