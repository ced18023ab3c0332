"""Features of Lightning that ordinary runs use, with the weights of one process: callbacks, the Tuner, hooks, data."""

import os

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler, ModelSummary
from lightning.pytorch.tuner import Tuner
from lightning_toy import FEATURES, on_ranks, shared_loader, toy_module, toy_trainer
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_sequence
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "sdp2": {"sharded_data_parallel_degree": 2},
    "zero1": {"pipeline_parallel_degree": 1, "shard_optimizer_state": True},
}


def fit(folder, smp, module, *, collate=None, **options):
    trainer = toy_trainer(folder, smp=smp, use_distributed_sampler=False, **options)
    loader = shared_loader(trainer, smp)
    if collate is not None:
        loader.collate_fn = collate
    trainer.fit(module, loader)
    return trainer


def sgd(self, lr=0.05):
    return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=lr, momentum=0.9)


def finetuning(folder, smp):
    module = toy_module(configure_optimizers=sgd)
    module.backbone = module.net[:4]
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    fit(folder, smp, module, callbacks=[callback], max_epochs=3)
    return module, []


def accumulation_schedule(folder, smp):
    module = toy_module()
    fit(folder, smp, module, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})], max_epochs=3)
    return module, []


def learning_rate_finder(folder, smp):
    module = toy_module(configure_optimizers=lambda self: sgd(self, self.lr))
    module.lr = 0.01
    trainer = toy_trainer(folder, smp=smp, use_distributed_sampler=False, max_epochs=5)
    first, second = shared_loader(trainer, smp), shared_loader(trainer, smp)
    found = Tuner(trainer).lr_find(module, first, num_training=20, early_stop_threshold=None)
    trainer.fit(module, second)
    return module, [found.suggestion(), module.lr]


def one_cycle(folder, smp):
    def optimizer_and_schedule(self):
        optimizer = sgd(self)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = toy_module(configure_optimizers=optimizer_and_schedule)
    trainer = fit(folder, smp, module)
    return module, [trainer.estimated_stepping_batches, trainer.optimizers[0].param_groups[0]["momentum"]]


def schedules_in_a_row(folder, smp):
    def optimizer_and_schedule(self):
        optimizer = sgd(self)
        parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 6)]
        return [optimizer], [{"scheduler": SequentialLR(optimizer, parts, [3]), "interval": "step"}]

    module = toy_module(configure_optimizers=optimizer_and_schedule)
    trainer = fit(folder, smp, module)
    return module, [trainer.optimizers[0].param_groups[0]["lr"]]


class Pair:
    """A batch that Lightning does not know."""

    def __init__(self, samples):
        self.inputs, self.targets = (torch.stack(each) for each in zip(*samples, strict=True))


def transfer_hook(folder, smp):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        batch.inputs, batch.targets = 2 * batch.inputs.to(device), batch.targets.to(device)
        return batch

    module = toy_module(
        transfer_batch_to_device=transfer_batch_to_device,
        training_step=lambda self, batch, batch_idx: self.loss((batch.inputs, batch.targets)),
        on_train_batch_start=LightningModule.on_train_batch_start,
    )
    fit(folder, smp, module, collate=Pair)
    return module, []


class Recurrent(LightningModule):
    """Over sequences of different lengths, or with the state of the batch before."""

    def __init__(self, *, keeps_state):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.rnn, self.head = nn.Linear(FEATURES, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 1)
        self.keeps_state, self.state = keeps_state, None

    def training_step(self, batch, batch_idx):
        if self.keeps_state:
            hidden, state = self.rnn(self.inner(batch[0])[:, None], self.state)
            self.state = tuple(each.detach() for each in state)
            return self.head(hidden).square().mean()
        _, (hidden, _) = self.rnn(batch)
        return self.head(hidden[-1]).square().mean() + 0 * self.inner.weight.sum()

    def on_train_epoch_start(self):
        self.state = None

    configure_optimizers = sgd


def packed_sequences(folder, smp):
    def pack(samples):
        return pack_sequence([inputs.repeat(1 + int(target), 1) for inputs, target in samples], enforce_sorted=False)

    module = Recurrent(keeps_state=False)
    fit(folder, smp, module, collate=pack)
    return module, []


def state_of_the_batch_before(folder, smp):
    module = Recurrent(keeps_state=True)
    fit(folder, {**smp, "microbatches": 1} if smp and "microbatches" in smp else smp, module)
    return module, []


def pruned_layers(folder, smp):
    module = toy_module()
    for number in (0, 4):
        prune.l1_unstructured(module.net[number], "weight", 0.3)
    fit(folder, smp, module)
    return module, [float((module.net[number].weight_mask == 0).float().mean()) for number in (0, 4)]


def summary_with_an_example(folder, smp):
    module = toy_module(forward=lambda self, inputs: self.net(inputs))
    module.example_input_array = torch.zeros(2, FEATURES)
    callback = ModelSummary(max_depth=-1)
    fit(folder, smp, module, callbacks=[callback], enable_model_summary=True, profiler="simple")
    return module, []


FEATURES_IN_USE = (
    *(finetuning, accumulation_schedule, learning_rate_finder, one_cycle, schedules_in_a_row, transfer_hook),
    *(packed_sequences, state_of_the_batch_before, pruned_layers, summary_with_an_example),
)


def run(folder, feature, smp):
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    module, numbers = feature(folder, smp)
    return {name: value.clone() for name, value in module.state_dict().items()}, numbers


# The search tries a hundred rates; the rounding of sums over shards reaches one element in 128 of the weights.
ATOL = {"learning_rate_finder": 5e-6}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("feature", FEATURES_IN_USE, ids=lambda feature: feature.__name__)
def test_weights_and_numbers_are_those_of_one_process(tmp_path, feature, layout):
    [(weights, numbers)] = on_ranks(run, 1, tmp_path / "plain", feature, None)
    for found, others in on_ranks(run, 2, tmp_path / layout, feature, LAYOUTS[layout]):
        torch.testing.assert_close(found, weights, rtol=1e-5, atol=ATOL.get(feature.__name__, 1e-6))
        assert others == pytest.approx(numbers, rel=1e-5)
