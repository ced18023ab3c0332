"""A training step through ``Trainer(strategy="smp")`` beside a plain PyTorch loop, on one device::

    python benchmarks/gpu/training_step.py                # a GPT of 1.2 billion weights, bfloat16, sequences of 4096
    python benchmarks/gpu/training_step.py --width 2560 --layers 32      # 2.5 billion

Both sides train the same model on the same batches, cut into the same microbatches, with the same fused AdamW; weights
are bfloat16 (``precision="bf16-true"``). With and without ``torch.compile`` of the blocks. A time is that of some steps
in a row, from when the device has done the steps before until it has done these.

Model FLOP/s count six per weight and token and those of causal attention, and not what is computed twice. The peak is
the vendor's for dense bfloat16.

The last line is JSON: ``tokens_per_second`` and ``mfu`` (ours, the better of both), ``worst_over_plain`` (seconds of
ours over those of the plain loop).
"""

import time
import warnings
from typing import Any

import lightning as L
import torch
from model import GPT, Shape
from tables import Target, arguments, finish, peak_flops, show
from torch import Tensor
from torch.utils.data import DataLoader

from smp_strategy import SMPStrategy

WARM_UPS, STEPS = 3, 10


def main() -> None:
    """Measure, and print."""
    options = arguments(__doc__, width=2048, layers=24, samples=8, microbatches=4)
    shape = Shape(layers=options.layers, width=options.width, heads=options.width // 128, length=4096)
    steps = STEPS
    if options.tiny:
        shape, steps = Shape(layers=2, width=16, heads=2, length=8), 2
    device = torch.device(options.device) if options.device == "cpu" else torch.device(options.device, 0)
    tokens, peak = options.samples * shape.length, peak_flops(device)
    rows, ratios, best = [], [], 0.0
    with torch.device("meta"):
        flops = shape.flops(sum(parameter.numel() for parameter in GPT(shape).parameters()), tokens)
    for compiled in (False,) if options.tiny else (False, True):
        found = {}
        for name, side in (("plain loop", plain), ("smp", through_trainer)):
            found[name] = side(shape, device, options.samples, options.microbatches, steps, compiled=compiled)
            mfu = "unknown" if peak is None else f"{flops / found[name] / peak:.1%}"
            rows.append([name, "yes" if compiled else "no", found[name], tokens / found[name], mfu])
            # At once: compiling can take longer than whoever runs this allows.
            print(f"{name}, {'compiled' if compiled else 'not compiled'}: {found[name]:.4g} s per step", flush=True)
        ratios.append(found["smp"] / found["plain loop"])
        best = max(best, tokens / found["smp"])
    show(f"{shape}, on {device}", ["side", "compiled", "seconds per step", "tokens/s", "MFU"], rows)
    mfu = None if peak is None else best * flops / tokens / peak
    figures = {"device": str(device), "tokens_per_second": best, "mfu": mfu, "worst_over_plain": max(ratios)}
    finish(figures, [Target("worst_over_plain", 1.01, is_least=False), Target("mfu", 0.55, is_least=True)])


def plain(shape: Shape, device: torch.device, samples: int, microbatches: int, steps: int, *, compiled: bool) -> float:
    """Seconds per step of a loop as anyone would write it."""
    torch.manual_seed(0)
    model = GPT(shape).to(device, torch.bfloat16)
    if compiled:
        for block in model.blocks:
            block.compile()
    optimizer = adamw(model)
    clock = Clock(device, steps)
    for number in range(WARM_UPS + steps):
        clock.step(number)
        batch = shape.batch(samples, device, number)
        optimizer.zero_grad()
        for part in batch.chunk(microbatches):
            (model.loss(part) / microbatches).backward()
        optimizer.step()
    return clock.stop()


def through_trainer(
    shape: Shape, device: torch.device, samples: int, microbatches: int, steps: int, *, compiled: bool
) -> float:
    """The same by ``Trainer.fit``."""
    torch.manual_seed(0)
    clock = Clock(device, steps)
    batches = [shape.batch(samples, torch.device("cpu"), number) for number in range(WARM_UPS + steps)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer = L.Trainer(
            strategy=SMPStrategy(microbatches=microbatches, compile=compiled),
            accelerator="cpu" if device.type == "cpu" else "gpu",
            devices=1,
            precision="bf16-true",
            max_epochs=1,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(shape), DataLoader(batches, batch_size=None))
    return clock.stop()


class Clock(L.Callback):
    """Times all steps but the first ones."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device = device
        self._steps = steps
        self._begin = self._end = 0.0

    def step(self, number: int) -> None:
        """Step ``number`` begins."""
        if number == WARM_UPS:
            self._begin = self._now()

    def stop(self) -> float:
        """All steps are queued: seconds of one."""
        return ((self._end or self._now()) - self._begin) / self._steps

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Of the Trainer."""
        self.step(batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        """The last of these counts; only it waits for the device."""
        if args[-1] == WARM_UPS + self._steps - 1:
            self._end = self._now()

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


class Module(L.LightningModule):
    """The same model for the Trainer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = GPT(shape)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of a batch, of which it gets microbatches."""
        return self.model.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As the plain loop has it."""
        return adamw(self)


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    """What both sides step with."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


if __name__ == "__main__":
    main()
