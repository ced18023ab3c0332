"""Ranks that part outside of steps, in ordinary code of Lightning and Accelerate: all are told, within seconds."""

import lightning as L
import pytest
import torch
from lightning_toy import error_of, toy_trainer
from torch import nn

from smp_strategy.testing import run_ranks

LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "sdp2": {"sharded_data_parallel_degree": 2},
    "tp2": {"tensor_parallel_degree": 2},
}


class Model(L.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stops(Model):
    def on_train_batch_end(self, *args):
        if self.global_rank == 0 and self.global_step == 2:
            self.trainer.should_stop = True


class Skips(Model):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.global_rank == 1 and batch_idx == 1 else None


class Saves(Model):
    def on_train_batch_end(self, *args):
        if self.global_rank == 0 and self.global_step == 2:
            self.trainer.save_checkpoint(f"{self.folder}/of_rank_0.ckpt")


class CallsTheModel(Model):
    def on_train_epoch_end(self):
        if self.global_rank == 0:
            self(torch.ones(2, 8))


class CallsTheModelInBetween(Model):
    def on_train_batch_end(self, *args):
        if self.global_rank == 1:
            self(torch.ones(2, 8))


class LooksAtWeights(Model):
    def on_train_batch_start(self, *args):
        if self.global_rank == 1 and self.global_step == 1:
            self.norm = float(self.net[0].weight.norm() + self.net[3].weight.norm())


class Reduces(Model):
    def on_train_batch_end(self, *args):
        if self.global_rank == 0:
            self.trainer.strategy.reduce_boolean_decision(True)


class CallsInACallback(L.Callback):
    def on_train_epoch_end(self, trainer, module):
        if trainer.global_rank == 0:
            with torch.no_grad():
                module(torch.ones(2, 8))


def fit(smp, kind, folder, callbacks):
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 8)), batch_size=4)
    trainer = toy_trainer(folder, smp=smp, callbacks=[each() for each in callbacks])
    return error_of(lambda: trainer.fit(kind(folder), data))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [
        (Stops, ()),
        (Skips, ()),
        (Saves, ()),
        (CallsTheModel, ()),
        (CallsTheModelInBetween, ()),
        (LooksAtWeights, ()),
        (Reduces, ()),
        (Model, (CallsInACallback,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_part_are_told_so(kind, callbacks, layout, tmp_path):
    for message in run_ranks(fit, 2, LAYOUTS[layout], kind, str(tmp_path), callbacks, timeout=60):
        assert "wait for each other for ever" in message or "same code" in message or "different calls" in message
