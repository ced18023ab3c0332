"""The text of ``corpus.py`` for Lightning.

A training epoch is a fixed number of windows at random places, drawn anew each epoch from the seed and the epoch's
number alone: every process draws the same ones, and a resumed run goes on where it stopped.
"""

from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from corpus import Windows, bounded, read_folder, split, standard_library

__all__ = ["TextData"]


class TextData(L.LightningDataModule):
    """Windows of bytes for training and validation.

    Args:
        path: a file, or a folder whose files are read; ``None``: the standard library of this Python.
        context: bytes that the model sees; a window holds one more.
        batch_size: windows per batch.
        train_windows: windows per epoch.
        val_windows: windows of held-out text, at even distances.
        max_bytes: text beyond this is not read.
        seed: where the training windows lie.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        context: int,
        batch_size: int,
        train_windows: int,
        val_windows: int,
        max_bytes: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.length = context + 1
        self.batch_size = batch_size
        self.train_windows = train_windows
        self.val_windows = val_windows
        self.max_bytes = max_bytes
        self.seed = seed
        self.train_text = self.val_text = torch.empty(0, dtype=torch.uint8)

    def setup(self, stage: str) -> None:
        """Read the text; every process reads the same bytes in the same order."""
        if self.train_text.numel():
            return
        documents = standard_library() if self.path is None else read_folder(Path(self.path))
        self.train_text, self.val_text = split(bounded(documents, self.max_bytes))
        shortest = min(self.train_text.numel(), self.val_text.numel())
        if shortest < self.length:
            raise ValueError(
                f"`data.path={self.path}` leaves {shortest} bytes on one side of the split, "
                f"but a window needs {self.length}. Give a longer text or a smaller `data.context`."
            )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """New windows each epoch (the trainer asks again: ``reload_dataloaders_every_n_epochs=1``)."""
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        # Two small numbers make one seed that differs for every pair.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        starts = torch.randint(self.train_text.numel() - self.length + 1, (self.train_windows,), generator=generator)
        return DataLoader(Windows(self.train_text, starts, self.length), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Always the same windows."""
        last = self.val_text.numel() - self.length
        starts = torch.linspace(0, last, self.val_windows, dtype=torch.float64).long()
        return DataLoader(Windows(self.val_text, starts, self.length), batch_size=self.batch_size)
