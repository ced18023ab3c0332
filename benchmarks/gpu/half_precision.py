"""A GPT trained in float16 with dynamic loss scaling reaches the loss that it reaches in bfloat16::

    python benchmarks/gpu/half_precision.py

The example's GPT learns to predict the bytes of this repository's sources, through ``Trainer(strategy="smp")`` with
``precision`` ``"32-true"``, ``"bf16-mixed"`` and ``"16-mixed"``, from the same weights and on the same batches. What is
compared is the mean loss of the last tenth of the steps. ``skipped`` counts steps whose gradients overflowed.

The last line is JSON: ``fp16_over_bf16`` and ``fp16_over_fp32`` (losses), ``skipped``.
"""

import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import lightning as L
import torch
from tables import Target, arguments, finish, show
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gpt import GPT
from smp_strategy import SMPStrategy

ROOT = Path(__file__).parents[2]
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def main() -> None:
    """Train three times, and print."""
    options = arguments(__doc__, steps=1000)
    sizes = {"context": 256, "layers": 6, "heads": 6, "width": 384}
    samples = 64
    if options.tiny:
        sizes, samples, options.steps = {"context": 16, "layers": 2, "heads": 2, "width": 16}, 8, 10
    data = windows(sizes["context"], samples, options.steps)
    losses, skipped, rows = {}, {}, []
    for precision in PRECISIONS:
        losses[precision], skipped[precision] = trained(precision, options.device, sizes, data)
        rows.append([precision, losses[precision], skipped[precision]])
    show(f"{options.steps} steps of {samples} samples, {sizes}", ["precision", "loss", "skipped"], rows)
    figures = {
        "device": options.device,
        "fp16_over_bf16": losses["16-mixed"] / losses["bf16-mixed"],
        "fp16_over_fp32": losses["16-mixed"] / losses["32-true"],
        "skipped": skipped["16-mixed"],
    }
    finish(figures, [Target("fp16_over_bf16", 1.01, is_least=False)])


def windows(context: int, samples: int, steps: int) -> Tensor:
    """Batches of bytes from sources, at random places."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "smp_strategy").rglob("*.py")))
    found = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(found) - context - 1, (steps, samples, 1), generator=torch.Generator().manual_seed(0))
    return found[starts + torch.arange(context + 1)]


def trained(precision: Any, kind: str, sizes: dict[str, int], data: Tensor) -> tuple[float, int]:
    """Loss at the end, and how many steps were skipped."""
    torch.manual_seed(0)
    module = Module(GPT(**sizes))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer = L.Trainer(
            strategy=SMPStrategy(microbatches=2),
            accelerator="cpu" if kind == "cpu" else "gpu",
            devices=1,
            precision=precision,
            max_epochs=1,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(list(data), batch_size=None))
    losses = [float(loss) for loss in module.losses]
    return mean(losses[-max(1, len(losses) // 10) :]), len(losses) - num_updates(trainer)


def num_updates(trainer: L.Trainer) -> int:
    """Of the optimizer, which leaves out steps that overflow."""
    state = trainer.optimizers[0].state
    return max((int(each["step"]) for each in state.values() if "step" in each), default=0)


class Module(L.LightningModule):
    """Trains the GPT and notes its losses."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of a microbatch."""
        return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the loss of the batch."""
        self.losses.append(outputs["loss"].detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


if __name__ == "__main__":
    main()
