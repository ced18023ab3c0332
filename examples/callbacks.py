"""Two ordinary Lightning callbacks; they run under any strategy."""

import time
from typing import Any

import lightning as L
from torch import Tensor

__all__ = ["LogFirstValidation", "Throughput"]


class LogFirstValidation(L.Callback):
    """Log the sanity check as the validation of step 0, which Lightning throws away: a curve needs its first value."""

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hand the results to the loggers before Lightning forgets them."""
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=0)


class Throughput(L.Callback):
    """Show how fast one replica trains: in tokens where a batch is one tensor of token ids, else in samples."""

    def __init__(self) -> None:
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock; forward, backward and the optimizer's step lie between."""
        seconds = time.perf_counter() - self._start
        if isinstance(batch, Tensor):
            pl_module.log("tokens_per_second", batch.numel() / seconds, prog_bar=True)
        else:
            pl_module.log("samples_per_second", len(batch[0]) / seconds, prog_bar=True)
