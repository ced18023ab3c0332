"""Writes the pages of reports that a run can save: ``python docs/sample_reports.py FOLDER``.

Two processes train the first script's module for one epoch, on the CPU.
"""

import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from smp_strategy import SMPStrategy


class Sorter(L.LightningModule):
    """Learns to sort 32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(8))

    def training_step(self, numbers: torch.Tensor) -> torch.Tensor:
        """Mean squared error of the sorted numbers."""
        x = numbers
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x - numbers.sort().values).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class SavesMemory(L.Callback):
    """Saves the memory report of the third step, which all ranks take part in."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        """Save it."""
        if trainer.global_step == 3:
            trainer.strategy.memory_report().save(self._path)


def main(folder: Path) -> None:
    """Train, and write ``plan.html``, ``timeline.html`` and ``memory.html``."""
    torch.manual_seed(0)
    strategy = SMPStrategy(pipeline_parallel_degree=2, microbatches=8)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[SavesMemory(folder / "memory.html")],
    )
    trainer.fit(Sorter(), DataLoader(torch.randn(512, 32), batch_size=64))
    strategy.timeline().save(folder / "timeline.html")
    strategy.explain().save(folder / "plan.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
