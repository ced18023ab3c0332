"""What several benchmarks train."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine

__all__ = ["GPT", "Batch", "Chain", "EngineSteps"]

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, num_heads: int = 6) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Chain(nn.Module):
    """One part after the other."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class GPT(NamedTuple):
    """Model of a workload: a GPT."""

    vocabulary: int
    separates_ends: bool
    """Whether embedding and head are parts of their own; otherwise they belong to the first and the last block."""
    length: int
    """Tokens of each of the two samples of a microbatch."""
    width: int = 384
    num_blocks: int = 8

    def model(self) -> Chain:
        embedding, head = nn.Embedding(self.vocabulary, self.width), nn.Linear(self.width, self.vocabulary, bias=False)
        first, *blocks, last = [Block(self.width) for _ in range(self.num_blocks)]
        if self.separates_ends:
            return Chain([embedding, first, *blocks, last, head])
        return Chain([nn.Sequential(embedding, first), *blocks, nn.Sequential(last, head)])

    def batch(self, num_microbatches: int) -> Batch:
        tokens = torch.randint(0, self.vocabulary, (2 * num_microbatches, self.length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Workload(Protocol):
    """What is trained, as far as an engine has to know it."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...


class EngineSteps:
    """Training steps of an engine, on the same batch again and again."""

    def __init__(
        self, workload: Workload, model: nn.Module, optimizer: Optimizer, batch: Batch, config: SMPConfig
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._loss, self._batch = workload.loss, batch
        self.engine = Engine(config)
        self.engine.attach(model, [optimizer])

    def step(self) -> None:
        self.optimizer.zero_grad()
        result = self.engine.train_step(
            lambda batch: self._loss(self.model(batch[0]), batch[1]),
            self._batch,
            loss_of=lambda loss: loss,
            reduces=True,
        )
        result.commit(torch.ones(()), reduce=True)
        self.engine.begin_update(self.optimizer)
        self.optimizer.step()
        self.engine.end_update(self.optimizer)
