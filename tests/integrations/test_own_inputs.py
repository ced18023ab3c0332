"""Ranks of a replica that call the model with inputs of their own are told so, before anything is computed."""

import os

import lightning as L
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning_toy import error_of, toy_loader, toy_module, toy_trainer
from torch import nn
from torch.utils.data import DataLoader

from smp_strategy import SMPPlugin
from smp_strategy.distributed import deadlock as watch
from smp_strategy.errors import SMPError
from smp_strategy.testing import run_ranks

LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "pp3": {"pipeline_parallel_degree": 3, "microbatches": 1},
    "tp2": {"tensor_parallel_degree": 2},
}
SHAPES, VALUES = "tensors of other shapes or dtypes", "tensors of the same shapes with other values"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4)))

    def forward(self, x, scale=1.0):
        return self.parts(x) * scale

    def encode(self, batch, scale=1.0):
        return self.parts[0](batch["x"]) * scale


def own(rank):
    return torch.Generator().manual_seed(rank)


def called(net, accelerator, way, rank):
    mine = torch.randn(4, 8, generator=own(rank))
    if way == "train":
        accelerator.backward(net(mine).square().mean())
        return
    with torch.no_grad():
        if way == "values":
            net(mine)
        elif way == "shapes":
            net(torch.ones(4 + 3 * rank, 8))
        elif way == "number":
            net(torch.ones(4, 8), 1.0 + rank)
        elif way == "method":
            net.encode({"x": mine})
        elif way == "same":
            net(torch.ones(4, 8), scale=2.0)


def error_of_call(smp, way):
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = Net()
    accelerator = Accelerator(cpu=True, parallelism_config=SMPPlugin(**smp))
    data = DataLoader(torch.randn(8, 8), batch_size=4)
    net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
    watch.PATIENCE_SECONDS, watch.PAUSE_SECONDS = 1.5, 0.2
    try:
        for x in data:
            accelerator.backward(net(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if way != "train":
            net.eval()
        called(net, accelerator, way, rank)
    except SMPError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("layout", "way", "said"),
    [
        ("pp2", "values", VALUES),
        ("pp2", "shapes", SHAPES),
        ("pp2", "train", VALUES),
        ("pp2", "number", VALUES),
        ("pp3", "method", VALUES),
        ("tp2", "values", VALUES),
        ("tp2", "shapes", SHAPES),
        ("tp2", "method", VALUES),
        ("pp3", "same", "nothing"),
        ("tp2", "same", "nothing"),
    ],
)
def test_ranks_that_call_the_model_with_inputs_of_their_own_are_told(layout, way, said):
    for message in run_ranks(error_of_call, 3 if layout == "pp3" else 2, LAYOUTS[layout], way, timeout=60):
        assert said in message


def noise_of_own(self, batch, dataloader_idx):
    batch[0].add_(torch.from_numpy(np.random.default_rng(self.global_rank).normal(size=batch[0].shape)).float())
    return batch


def call_in_hook(self):
    with torch.no_grad():
        self.net(torch.ones(2, 8) * self.global_rank)


def call_alike_in_hook(self):
    with torch.no_grad():
        self.net(torch.ones(2, 8))


class CallsOther(L.Callback):
    def on_train_epoch_end(self, trainer, module):
        with torch.no_grad():
            module.net(torch.ones(2 + trainer.global_rank, 8))


def fit(smp, overrides, callbacks, folder):
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, callbacks=[each() for each in callbacks])
    return error_of(lambda: trainer.fit(toy_module(**overrides), toy_loader()))


@pytest.mark.parametrize(
    ("overrides", "callbacks", "said"),
    [
        ({"on_after_batch_transfer": noise_of_own}, (), VALUES),
        ({"on_train_epoch_end": call_in_hook}, (), VALUES),
        ({}, (CallsOther,), SHAPES),
        ({"on_train_epoch_end": call_alike_in_hook}, (), "nothing"),
    ],
    ids=["transfer", "hook", "callback", "alike"],
)
def test_inputs_that_hooks_make_on_each_rank_are_compared(overrides, callbacks, said, tmp_path):
    for message in run_ranks(fit, 2, LAYOUTS["pp2"], overrides, callbacks, str(tmp_path), timeout=60):
        assert said in message


def noise_for_a_unit(self, batch, batch_idx):
    noise = torch.from_numpy(np.random.default_rng(self.global_rank).normal(size=batch[0].shape)).float()
    return self.loss((batch[0] + noise, batch[1]))


def noise_above_units(self, batch, batch_idx):
    hidden = self.net[0](batch[0])
    mask = torch.rand(hidden.shape, generator=own(self.global_rank)) > 0.5
    return self.net[2:](hidden * mask).square().mean()


def not_filled_above_units(self, batch, batch_idx):
    hidden = self.net[0](batch[0])
    out = torch.full(hidden.shape, float(self.global_rank))  # as `torch.empty` may leave it
    out[:] = hidden
    return self.net[2:](out).square().mean()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (noise_for_a_unit, "Ranks 0 and 1 are in a call of `net"),
        (noise_above_units, "Ranks 0 and 1 are in a call of `mul` with different inputs"),
        (not_filled_above_units, "nothing"),
    ],
)
def test_noise_that_each_rank_draws_in_a_step_is_told(step, said, tmp_path):
    layouts = [LAYOUTS["pp2"]]
    if step is noise_for_a_unit:
        layouts.append({**LAYOUTS["tp2"], "tensor_parallel": {"net.2": "column", "net.4": "row"}})
    for smp in layouts:
        for message in run_ranks(fit, 2, smp, {"training_step": step}, (), str(tmp_path), timeout=60):
            assert said in message
