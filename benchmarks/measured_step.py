"""Measured over predicted seconds of the fastest step, for layers that take known times.

    python benchmarks/measured_step.py docs/pictures/measured.json     # the trace that a picture shows
    python benchmarks/measured_step.py --quick                         # two stages, three steps: does it run?

The layers sleep, on four stages, so the step can be timed where processors have other work, too.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from sleepers import Sleepers
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from smp_strategy import SMPStrategy

__all__ = ["main"]

MICROBATCHES = 8
SECONDS = 0.04  # of each pass of a layer


class Sleeping(L.LightningModule):
    """Layers that sleep; the second one has more to do than the others."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.model = Sleepers((SECONDS, 1.5 * SECONDS, *[SECONDS] * (num_layers - 2))).model()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Mean squared error."""
        return (self.model(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class KeepsTheFastest(L.Callback):
    """Keeps the ratio of the fastest step, and saves its timeline.

    Args:
        trace: File for the timeline; ``None``: none.
    """

    def __init__(self, trace: Path | None) -> None:
        self._trace, self._fastest = trace, float("inf")
        self.ratio = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        """Compare; all ranks of the replica take part."""
        timeline = trainer.strategy.timeline()  # type: ignore[attr-defined]
        seconds = timeline.comparison.seconds
        if trainer.global_step > 2 and seconds < self._fastest:  # the first steps measure and warm up
            self._fastest, self.ratio = seconds, seconds / timeline.plan.makespan
            if self._trace is not None:
                timeline.save(self._trace)


def main(arguments: Sequence[str]) -> None:
    """Train a few steps, and print the figure."""
    num_stages, steps = (2, 3) if "--quick" in arguments else (4, 12)
    torch.manual_seed(0)
    samples = TensorDataset(*torch.randn(2, MICROBATCHES * steps, 16))
    strategy = SMPStrategy(
        pipeline_parallel_degree=num_stages, microbatches=MICROBATCHES, pipeline="1f1b", trace_execution_times=True
    )
    kept = KeepsTheFastest(next((Path(each) for each in arguments if not each.startswith("-")), None))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=num_stages,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[kept],
    )
    trainer.fit(Sleeping(num_stages), DataLoader(samples, batch_size=MICROBATCHES))
    if trainer.is_global_zero:
        print(json.dumps({"measured_over_predicted": round(kept.ratio, 3)}))


if __name__ == "__main__":
    main(sys.argv[1:])
