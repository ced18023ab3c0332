"""A small GPT over bytes, as anyone would write it, and the LightningModule that trains it.

There is no parallel code here and no import of ``smp_strategy``: the Trainer's strategy finds the blocks, places them
on pipeline ranks and runs these very methods.
"""

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from optimization import Recipe

__all__ = ["GPT", "LanguageModel"]

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each token with those before it; ``x`` is batch x time x width."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """One step of the residual stream."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out.

    Args:
        context: longest sequence.
        layers: number of blocks.
        heads: attention heads per block.
        width: features of a token.
        tied: let the output layer share the weights of the input embedding.
    """

    def __init__(self, *, context: int, layers: int, heads: int, width: int, tied: bool = False) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialize)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("out.weight", "mlp.2.weight")):  # both add to the residual stream at every depth
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
        if tied:
            self.head.weight = self.tokens.weight

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, batch x time x 256, for ``tokens``, batch x time."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModel(L.LightningModule):
    """Next-byte prediction.

    Args:
        model: maps tokens to logits.
        optimization: optimizer and schedule.
    """

    def __init__(self, model: GPT, optimization: Recipe) -> None:
        super().__init__()
        self.model = model
        self.optimization = optimization
        self.context = model.context

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte after each of ``tokens``."""
        return self.model(tokens)

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        """Mean loss over the targets of ``windows``."""
        loss = self._loss(windows)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        """The same loss on held-out text, and its mean over replicas, if there are any."""
        self.log("val_loss", self._loss(windows), prog_bar=True, sync_dist=True)

    def _loss(self, windows: Tensor) -> Tensor:
        logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a warm-up and a half cosine."""
        return self.optimization.build(self)
