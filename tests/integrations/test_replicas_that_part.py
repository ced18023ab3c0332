"""Ranks that part: their collectives differ in size and kind, and all of them are told so, within seconds."""

import os

import lightning as L
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning_toy import error_of, toy_trainer
from torch import nn

from smp_strategy import SMPPlugin
from smp_strategy.testing import run_ranks

LAYOUTS = {
    "rep2": {"pipeline_parallel_degree": 1},
    "zero1": {"pipeline_parallel_degree": 1, "shard_optimizer_state": True},
    "sdp2": {"sharded_data_parallel_degree": 2},
}
# With these, steps reduce something else besides gradients.
SETTINGS = {"plain": {}, "clipped": {"gradient_clip_val": 0.1}, "accumulated": {"accumulate_grad_batches": 2}}


class Model(L.LightningModule):
    batches = (8, 8)

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    @property
    def parts(self):
        """Whether this is the one rank, at the one step, where something else is done."""
        return self.global_rank == 1 and self.trainer.fit_loop.epoch_loop.batch_idx == 1

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Stops(Model):
    def on_train_batch_end(self, *args):
        if self.parts:
            self.trainer.should_stop = True


class StopsAfterAnEpoch(Model):
    def on_train_epoch_end(self):
        if self.global_rank == 0:
            self.trainer.should_stop = True


class Skips(Model):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.parts else None


class HasNoLoss(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.parts else loss


class HasFewerBatches(Model):
    batches = (8, 5)


class Saves(Model):
    def on_train_batch_end(self, *args):
        if self.parts:
            self.trainer.save_checkpoint(f"{self.folder}/of_rank_1.ckpt")


class Logs(Model):
    def on_train_batch_end(self, *args):
        if self.parts:
            self.log("here", 1.0, sync_dist=True)


class LogsInAStep(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            self.log("loss", loss, sync_dist=True)
        return loss


class ReducesInAStep(Model):
    def training_step(self, batch, batch_idx):
        if self.parts:
            dist.all_reduce(torch.ones(3))
        return super().training_step(batch, batch_idx)


class WaitsAtABarrier(Model):
    def on_train_batch_end(self, *args):
        if self.parts:
            self.trainer.strategy.barrier()


class Clips(Model):
    def on_before_optimizer_step(self, optimizer):
        if self.parts:
            self.clip_gradients(optimizer, 0.1, "norm")


class CallsABarrier(Model):
    def on_train_batch_end(self, *args):
        if self.parts:
            dist.barrier()


class ReducesLater(Model):
    def on_train_start(self):
        if self.trainer.global_rank == 1:
            dist.all_reduce(torch.ones(3), async_op=True).wait()


class TellsObjects(Model):
    def on_train_epoch_end(self):
        if self.global_rank == 0:
            dist.all_gather_object([None, None], "alone")


KINDS = [Stops, StopsAfterAnEpoch, Skips, HasFewerBatches, Saves, Logs, LogsInAStep, ReducesInAStep]
KINDS += [WaitsAtABarrier]


def fit(smp, kind, folder, settings):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 8),) for _ in range(kind.batches[int(os.environ["RANK"])])]
    data = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer = toy_trainer(folder, smp=smp, use_distributed_sampler=False, **settings)
    return error_of(lambda: trainer.fit(kind(folder), data))


def is_told(found):
    return all("wait for each other for ever" in each or "different calls" in each for each in found)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda value: value.__name__)
def test_replicas_that_part_are_told_so(kind, layout, setting, tmp_path):
    assert is_told(run_ranks(fit, 2, LAYOUTS[layout], kind, str(tmp_path), SETTINGS[setting], timeout=60))


@pytest.mark.parametrize("layout", [*LAYOUTS, "pp2", "tp2"])
@pytest.mark.parametrize("kind", [CallsABarrier, ReducesLater, TellsObjects], ids=lambda value: value.__name__)
def test_a_collective_of_torch_that_one_rank_calls_in_a_hook_is_told(kind, layout, tmp_path):
    smp = {**LAYOUTS, "pp2": {"microbatches": 2}, "tp2": {"tensor_parallel_degree": 2}}[layout]
    assert is_told(run_ranks(fit, 2, smp, kind, str(tmp_path), SETTINGS["plain"], timeout=60))


@pytest.mark.parametrize("layout", ["zero1", "sdp2"])
def test_a_norm_that_one_rank_asks_for_is_told_where_ranks_have_parts_of_it(layout, tmp_path):
    assert is_told(run_ranks(fit, 2, LAYOUTS[layout], Clips, str(tmp_path), SETTINGS["plain"], timeout=60))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_without_a_loss_on_one_rank_trains_on_with_the_others_gradients(layout, setting, tmp_path):
    found = run_ranks(fit, 2, LAYOUTS[layout], HasNoLoss, str(tmp_path), SETTINGS[setting], timeout=60)
    assert found == ["nothing"] * 2


def train_by_hand(kind):
    """A script of Accelerate's, in which one process ends early."""
    accelerator = Accelerator(cpu=True, parallelism_config=SMPPlugin(pipeline_parallel_degree=1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    data = torch.utils.data.DataLoader([torch.randn(8) for _ in range(64)], batch_size=4)
    model, optimizer, data = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), data)
    for number, batch in enumerate(data):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and not accelerator.is_main_process:
            break
    if kind == "then gathers":
        accelerator.gather(loss.detach())
    accelerator.wait_for_everyone()


def end_of_script(kind):
    return error_of(lambda: train_by_hand(kind))


@pytest.mark.parametrize("kind", ["then ends", "then gathers"])
def test_replicas_of_a_script_of_which_one_ends_early_are_told_so(kind):
    assert is_told(run_ranks(end_of_script, 2, kind, timeout=60))
