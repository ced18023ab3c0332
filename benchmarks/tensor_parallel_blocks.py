"""Transformer blocks in plain PyTorch, which say which of their layers can be split over ranks.

Their code takes the number of heads from what it computes, so that it runs on some of the heads as it does on all.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT2Block", "LlamaBlock"]

HEAD = 32


class LlamaBlock(nn.Module):
    """Rotary embedding, grouped-query attention, gated MLP, no biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        hidden = width * 11 // 4
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def columns(self) -> dict[str, dict[str, Any]]:
        """Layers that begin a region, and how they are split."""
        heads, features = {"granule": HEAD, "shares_input": True}, {"shares_input": True}
        return {"q": heads, "k": heads, "v": heads, "gate": features, "up": features}

    def rows(self) -> list[str]:
        """Layers that end one."""
        return ["o", "down"]


class GPT2Block(nn.Module):
    """Queries, keys and values of a head stand together in one layer; layer norms, biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, 3, HEAD)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def columns(self) -> dict[str, dict[str, Any]]:
        """Layers that begin a region, and how they are split."""
        return {"qkv": {"granule": 3 * HEAD}, "up": {}}

    def rows(self) -> list[str]:
        """Layers that end one."""
        return ["o", "down"]


def rotated(heads: Tensor) -> Tensor:
    """With the positions in them."""
    length, size = heads.shape[-2:]
    angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, size, 2) / size))
    first, second = heads.chunk(2, -1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
