"""Transformer blocks in plain PyTorch, which say which of their layers can be split over ranks.

Their code takes the number of heads from what it computes, so that it runs on some of the heads as it does on all.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BLOCKS", "Block", "Region"]

HEAD = 32


class Region(nn.Module):
    """What can be split: it begins with some linear layers, and ends with one.

    Attributes:
        columns: names of the first ones, and how they are split.
        row: name of the last one.
    """

    columns: Mapping[str, Mapping[str, Any]]
    row: str


class LlamaAttention(Region):
    """Rotary embedding, half as many keys and values as queries, no biases."""

    columns = {name: {"granule": HEAD, "shares_input": True} for name in ("q", "k", "v")}
    row = "o"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class LlamaMLP(Region):
    """With a gate."""

    columns = {name: {"shares_input": True} for name in ("gate", "up")}
    row = "down"

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width * 11 // 4
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GPT2Attention(Region):
    """Queries, keys and values of a head stand together in one layer."""

    columns = {"qkv": {"granule": 3 * HEAD}}
    row = "o"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, HEAD)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class GPT2MLP(Region):
    """Two layers."""

    columns = {"up": {}}
    row = "down"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        norm, attention, mlp = BLOCKS[kind]
        self.attention_norm, self.attention = norm(width), attention(width)
        self.mlp_norm, self.mlp = norm(width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


BLOCKS = {"llama": (nn.RMSNorm, LlamaAttention, LlamaMLP), "gpt2": (nn.LayerNorm, GPT2Attention, GPT2MLP)}


def rotated(heads: Tensor) -> Tensor:
    """With the positions in them."""
    length, size = heads.shape[-2:]
    angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, size, 2) / size))
    first, second = heads.chunk(2, -1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
