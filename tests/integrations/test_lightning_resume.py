"""A run that is stopped anywhere and resumed ends with the same bits as one that goes through."""

import os
import random

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from lightning.pytorch.utilities import CombinedLoader
from lightning_toy import on_ranks, toy_data, toy_loader
from resume_runs import (
    SAMPLES,
    Noisy,
    Saver,
    content,
    differences,
    interrupted_everywhere,
    plateau,
    run,
    transfer_with_noise,
)
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, IterableDataset, RandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

ONE = {"pipeline_parallel_degree": 1, "microbatches": 2}
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}


def noisy(**options):
    return toy_loader(dataset=Noisy(), **options)


def by_hand(self, batch, batch_idx):
    optimizer = self.optimizers()
    self.manual_backward(self.loss(batch) / 2)
    if (batch_idx + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()


def manual(self):
    return False


MANUAL = {"training_step": by_hand, "automatic_optimization": property(manual)}
SOME = slice(1, None, 3)
MOMENTS = {
    "epochs": {},
    # After the last step a resumed run has nothing to do, and does not end the epoch either.
    "steps": {"max_steps": 5, "max_epochs": -1, "chosen": slice(-1)},
    "no validation": {"validates": False, "max_steps": 5, "max_epochs": -1, "chosen": slice(2, -1)},
    "validation within the epoch": {"val_check_interval": 2, "overrides": {"configure_optimizers": plateau}},
    "accumulation": {"accumulate_grad_batches": 2, "chosen": SOME},
    "accumulation by hand": {"overrides": MANUAL, "chosen": slice(0, None, 2)},
    "part of the data": {"limit_train_batches": 2, "reload_dataloaders_every_n_epochs": 1, "chosen": SOME},
}


@pytest.mark.dear
@pytest.mark.parametrize("name", MOMENTS)
def test_it_does_not_matter_when_a_run_is_interrupted(name, tmp_path):
    [found] = on_ranks(interrupted_everywhere, 1, tmp_path, ONE, noisy, **MOMENTS[name])
    assert not any(found.values()), found


class PythonShuffle(BatchSampler):
    """Draws along the way from a generator from which the dataset draws as well."""

    def __init__(self, size, batch_size):
        super().__init__(range(size), batch_size, drop_last=False)

    def __iter__(self):
        order = list(range(len(self.sampler)))
        random.shuffle(order)
        for start in range(0, len(order), self.batch_size):
            random.random()
            yield order[start : start + self.batch_size]


class Stream(IterableDataset):
    """Has no length, and draws."""

    def __iter__(self):
        noisy, info = Noisy(), get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, SAMPLES, step):
            yield noisy[index]


def own():
    return torch.Generator().manual_seed(os.getpid())


def replaced():
    sampler = RandomSampler(Noisy(), generator=own(), replacement=True, num_samples=32)
    return DataLoader(Noisy(), batch_size=8, sampler=sampler)


def two_loaders():
    longer = ConcatDataset([Noisy(), Noisy()])
    return CombinedLoader({"a": noisy(), "b": toy_loader(dataset=longer)}, "max_size_cycle")


def step_of_two(self, batch, batch_idx):
    return self.loss(batch["a"]) + self.loss(batch["b"])


def transfer_two(self, batch, dataloader_idx):
    if not isinstance(batch, dict):
        return batch
    return {name: transfer_with_noise(self, part, dataloader_idx) for name, part in batch.items()}


LOADERS = {
    "batch sampler of the user": lambda: DataLoader(Noisy(), batch_sampler=PythonShuffle(SAMPLES, 8)),
    "own generator": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, generator=own()),
    "with replacement": replaced,
    "workers": lambda: noisy(num_workers=2),
    "iterable": lambda: DataLoader(Stream(), batch_size=8),
    "iterable in workers": lambda: DataLoader(Stream(), batch_size=8, num_workers=2),
    "stateful": lambda: StatefulDataLoader(Noisy(), batch_size=8, shuffle=True),
    "stateful and iterable": lambda: StatefulDataLoader(Stream(), batch_size=8),
    "several": two_loaders,
}
OF_TWO = {"training_step": step_of_two, "on_after_batch_transfer": transfer_two}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_go_on_with_the_batches_that_they_have_not_given(name, tmp_path):
    overrides = OF_TWO if name == "several" else {}
    chosen = slice(1, None, 4)  # in the first epoch and in the second one
    [found] = on_ranks(
        interrupted_everywhere, 1, tmp_path, ONE, LOADERS[name], chosen, validates=False, overrides=overrides
    )
    assert not any(found.values()), found


LAYOUTS = {
    "stages": (2, PP2),
    "replicas": (2, ONE),
    "shards": (2, {**ONE, "sharded_data_parallel_degree": 2}),
    "state shards": (2, {**ONE, "shard_optimizer_state": True}),
    "parts": (
        2,
        {
            **ONE,
            "tensor_parallel_degree": 2,
            "tensor_parallel": {"net.0": "column", "net.3": "row"},
        },
    ),
    "replicas of stages": (4, PP2),
}


@pytest.mark.dear
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_under_each_layout(layout, form, tmp_path):
    ranks, smp = LAYOUTS[layout]
    smp = {**smp, "state_dict_type": form}
    chosen = slice(0, None, 5)  # within an accumulation window, and in the second epoch
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    for found in on_ranks(interrupted_everywhere, ranks, tmp_path, smp, noisy, chosen, **options):
        assert not any(found.values()), found


def callbacks():
    return [EarlyStopping("train_loss", patience=0, min_delta=0.05), EMAWeightAveraging(decay=0.5)]


@pytest.mark.dear
def test_callbacks_go_on(tmp_path):
    chosen = slice(0, None, 4)
    options = {"callbacks": callbacks, "max_epochs": 4, "validates": False}
    for found in on_ranks(interrupted_everywhere, 2, tmp_path, PP2, noisy, chosen, **options):
        assert not any(found.values()), found


SETTINGS = {
    "three stages": (3, {**PP2, "pipeline_parallel_degree": 3}),
    "activation checkpointing": (2, {**PP2, "activation_checkpointing": "all"}),
    "offload": (2, {**PP2, "activation_checkpointing": "all", "offload_activations": True}),
    "virtual stages": (2, {**PP2, "virtual_pipeline_degree": 2, "pipeline": "interleaved"}),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run over two stages, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("interrupted")
    on_ranks(interrupted_run, 2, folder)
    return folder


def interrupted_run(folder):
    run(folder, PP2, noisy, callbacks=[Saver(folder)], accumulate_grad_batches=2)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_resumes_under_another_pipeline_with_the_same_bits(setting, tmp_path, interrupted):
    ranks, smp = SETTINGS[setting]
    checkpoint = interrupted / "00-batch.ckpt"
    on_ranks(run, ranks, tmp_path, smp, noisy, None, checkpoint, accumulate_grad_batches=2)
    expected, found = content(interrupted / "start.ckpt"), content(tmp_path / "resumed.ckpt")
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert not differences(found[part], expected[part])
    by_data_rank = [each["smp_strategy"]["resume"]["by_data_rank"] for each in (found, expected)]
    assert not differences(*by_data_rank)


SHARES = {
    "shards of all": (4, {**ONE, "sharded_data_parallel_degree": 4}, 2),
    "shards of some": (4, {**ONE, "sharded_data_parallel_degree": 2}, 2),
    "larger shares": (2, ONE, 4),
    "smaller batches": (2, ONE, 2),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A run of four replicas, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("shared")
    on_ranks(shared_run, 4, folder)
    return folder


def shared_run(folder):
    # Each step is 8 samples, in all. Everything is deterministic but the order of samples.
    run(folder, ONE, clean(2), callbacks=[Saver(folder)], is_noisy=False)


def clean(batch_size):
    return lambda: toy_loader(dataset=toy_data(32), batch_size=batch_size)


def resumed(folder, smp, batch_size, checkpoint):
    seen = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append((trainer.current_epoch, batch[0][:, 0].tolist()))

    run(folder, smp, clean(batch_size), None, checkpoint, [Watch()], is_noisy=False)
    return [value for epoch, values in seen if epoch == 0 for value in values]


@pytest.mark.dear
@pytest.mark.parametrize("share", SHARES)
def test_a_run_resumes_with_the_samples_that_are_left_however_they_are_shared(share, tmp_path, shared):
    ranks, smp, batch_size = SHARES[share]
    found = on_ranks(resumed, ranks, tmp_path, smp, batch_size, shared / "01-batch.ckpt")
    samples = [value for each in found for value in each]
    assert len(samples) == len(set(samples)) == 16
    if share != "smaller batches":
        states = (content(shared / "start.ckpt")["state_dict"], content(tmp_path / "resumed.ckpt")["state_dict"])
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-6, msg=name)
