"""Hugging Face's GPT-2 in a LightningModule of twenty lines, with the loss that the model computes itself.

Its output layer shares the weights of the input embedding, which sit at the two ends of a pipeline. That too is the
strategy's business, not this file's.
"""

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from optimization import Recipe

__all__ = ["LanguageModel"]


class LanguageModel(L.LightningModule):
    """Next-byte prediction with a model that starts from random weights.

    Args:
        config: size of the model.
        optimization: optimizer and schedule.
    """

    def __init__(self, config: GPT2Config, optimization: Recipe) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(config)
        self.optimization = optimization
        self.context = config.n_positions

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte after each of ``tokens``."""
        return self.model(input_ids=tokens).logits

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        """The model's loss; it shifts the labels itself."""
        loss = self.model(input_ids=windows, labels=windows).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        """The same loss on held-out text, and its mean over replicas, if there are any."""
        loss = self.model(input_ids=windows, labels=windows).loss
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a warm-up and a half cosine."""
        return self.optimization.build(self)
