"""Write the trace that a picture shows: ``PYTHONPATH=benchmarks python docs/measured_step.py``.

Four stages of layers that sleep: so the step can be timed where processors have other work, too. The trace of the
fastest step is kept.
"""

from pathlib import Path

import lightning as L
import torch
from sleepers import Sleepers
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from smp_strategy import SMPStrategy

__all__ = ["main"]

NUM_STAGES, MICROBATCHES, STEPS = 4, 8, 12
SECONDS = 0.04  # of each pass of a layer
TRACE = Path(__file__).parent / "pictures" / "measured.json"


class Sleeping(L.LightningModule):
    """Layers that sleep; the second stage has more to do than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Sleepers((SECONDS, 1.5 * SECONDS, SECONDS, SECONDS)).model()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Mean squared error."""
        return (self.model(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SavesTrace(L.Callback):
    """Saves the timeline of the fastest step, without the first ones."""

    def __init__(self) -> None:
        self._fastest = float("inf")

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        """Save it; all ranks of the replica take part."""
        timeline = trainer.strategy.timeline()  # type: ignore[attr-defined]
        if trainer.global_step > 2 and timeline.comparison.seconds < self._fastest:
            self._fastest = timeline.comparison.seconds
            timeline.save(TRACE)


def main() -> None:
    """Train a few steps on four processes."""
    torch.manual_seed(0)
    samples = TensorDataset(*torch.randn(2, MICROBATCHES * STEPS, 16))
    strategy = SMPStrategy(
        pipeline_parallel_degree=NUM_STAGES, microbatches=MICROBATCHES, pipeline="1f1b", trace_execution_times=True
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=NUM_STAGES,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[SavesTrace()],
    )
    trainer.fit(Sleeping(), DataLoader(samples, batch_size=MICROBATCHES))


if __name__ == "__main__":
    main()
