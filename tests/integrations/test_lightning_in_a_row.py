"""Stages do not wait for each other between steps: one begins a step while another still ends the one before.

That is not timed but made sure of: gradients of weights on the last stage wait until the first stage has begun the next
step. If anything in between made stages wait for each other, they would wait for ever.
"""

import time
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_toy import CLASSES, FEATURES, NEWER, on_ranks, quiet, toy_loader, toy_trainer
from torch import Tensor, nn

STEPS, MICROBATCHES = 12, 4
# The first batches of a pass over the data are compared between ranks.
FIRST = 4
SMP = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "pipeline": "zb-h2"}
PATIENCE_SECONDS = 20.0


class Latch:
    """Steps that the first stage has begun, known to the other stage while both compute."""

    def __init__(self) -> None:
        self.begun = self.gradients = 0
        self.waited: list[int] = []

    def begin(self) -> None:
        if self.begun % MICROBATCHES == 0:
            _store().set(f"step {self.begun // MICROBATCHES}", "begun")
        self.begun += 1

    def wait(self) -> None:
        """Before the last gradient of a step, until the next one has begun."""
        self.gradients += 1
        step, rest = divmod(self.gradients, MICROBATCHES)
        if rest == 0 and FIRST <= step < STEPS:
            for _ in range(int(PATIENCE_SECONDS / 0.01)):
                if _store().check([f"step {step}"]):
                    self.waited.append(step)
                    return
                time.sleep(0.01)
            raise TimeoutError(f"the first stage has not begun step {step} while the last stage was in the one before")


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


class Waiting(torch.autograd.Function):
    """Waits on the way of the weight's gradient."""

    @staticmethod
    def forward(ctx, weight: Tensor, latch: Latch | None) -> Tensor:
        ctx.latch = latch
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.latch is not None and type(gradient) is Tensor:  # and not in a dry run
            ctx.latch.wait()
        return gradient, None


class First(nn.Linear):
    latch: Latch | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.latch is not None and type(x) is Tensor and not torch.is_inference_mode_enabled():
            self.latch.begin()
        return super().forward(x)


class Last(nn.Linear):
    latch: Latch | None = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Waiting.apply(self.weight, self.latch), self.bias)


class Module(import_module(NEWER).LightningModule):
    """No hook that runs in every step: in those stages do meet."""

    def __init__(self, latch: Latch | None) -> None:
        super().__init__()
        self.first, self.last = First(FEATURES, FEATURES), Last(FEATURES, CLASSES)
        self.first.latch = self.last.latch = latch

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = F.cross_entropy(self.last(self.first(inputs)), targets)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, smp, options):
    torch.manual_seed(0)
    latch = None if smp is None else Latch()
    module, trainer = Module(latch), toy_trainer(folder, smp=smp, max_epochs=1, **options)
    trainer.fit(module, toy_loader(shuffle=False, batch_size=4))
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    return weights, float(trainer.callback_metrics["train_loss_epoch"]), [] if latch is None else latch.waited


def test_a_stage_begins_a_step_while_another_ends_the_one_before(tmp_path):
    with quiet():
        weights, loss, _ = fit(tmp_path, None, {})
    # Rank 0 is the last stage.
    found = on_ranks(fit, 2, tmp_path, SMP, {"enable_progress_bar": True})
    assert [waited for _, _, waited in found] == [list(range(FIRST, STEPS)), []]
    for here, mine, _ in found:
        torch.testing.assert_close(here, weights, rtol=1e-5, atol=1e-6)
        assert mine == pytest.approx(loss, rel=1e-5)


def test_the_test_notices_stages_that_wait_for_each_other(tmp_path, monkeypatch):
    """Clipping by the norm of all gradients is such a reason."""
    monkeypatch.setattr(f"{__name__}.PATIENCE_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match="the first stage has not begun step 4"):
        on_ranks(fit, 2, tmp_path, SMP, {"gradient_clip_val": 1.0})
