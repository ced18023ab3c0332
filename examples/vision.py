"""Image classification: Hugging Face's vision transformer on the handwritten digits that scikit-learn carries."""

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

from optimization import Recipe

__all__ = ["DigitsData", "ImageClassifier"]

NUM_TRAIN = 1536  # of 1797; a multiple of every usual batch size, so no epoch ends with a smaller batch
NUM_VAL = 256

Batch = tuple[Tensor, Tensor]  # images and labels


class ImageClassifier(L.LightningModule):
    """A vision transformer that starts from random weights.

    Args:
        config: size of the model.
        optimization: optimizer and schedule.
    """

    def __init__(self, config: ViTConfig, optimization: Recipe) -> None:
        super().__init__()
        self.model = ViTForImageClassification(config)
        self.optimization = optimization

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the ten digits."""
        return self.model(pixel_values=images).logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return self._loss_and_log(batch, "train")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Cross-entropy and accuracy on held-out images."""
        self._loss_and_log(batch, "val")

    def _loss_and_log(self, batch: Batch, name: str) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        accuracy = (logits.argmax(dim=-1) == labels).float().mean()
        # Of a validation the mean over replicas counts, if there are any.
        values = {f"{name}_loss": loss, f"{name}_accuracy": accuracy}
        self.log_dict(values, prog_bar=True, sync_dist=name == "val")
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a warm-up and a half cosine."""
        return self.optimization.build(self)


class DigitsData(L.LightningDataModule):
    """Images of 8 x 8 pixels with values from -1 to 1, and their labels.

    Args:
        batch_size: images per batch.
        seed: which images are held out, and the order of the others.
    """

    def __init__(self, *, batch_size: int, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Shuffle once, then split."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        self.train = TensorDataset(images[order[:NUM_TRAIN]], labels[order[:NUM_TRAIN]])
        held_out = order[NUM_TRAIN : NUM_TRAIN + NUM_VAL]
        self.val = TensorDataset(images[held_out], labels[held_out])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Another order each epoch (the trainer asks again: ``reload_dataloaders_every_n_epochs=1``)."""
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, generator=generator, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Always the same order."""
        return DataLoader(self.val, batch_size=self.batch_size)
