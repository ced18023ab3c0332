"""Ranks of one pipeline read the same batches; replicas share the samples."""

import os
import random

import numpy
import pytest
import torch
from lightning_toy import metrics_of, on_ranks, quiet, toy_data, toy_loader, toy_module, toy_trainer
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler

from smp_strategy.distributed.agreement.same_inputs import digest_of


def unseed():
    """As in a script that seeds nothing: every rank begins somewhere else."""
    seed = int.from_bytes(os.urandom(4), "big")
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


class PythonShuffle(BatchSampler):
    """A batch sampler of the user's own, which shuffles with Python's generator."""

    def __init__(self, size, batch_size):
        super().__init__(range(size), batch_size, drop_last=False)

    def __iter__(self):
        order = list(range(len(self.sampler)))
        random.shuffle(order)
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]


class Noisy(Dataset):
    """Augments with all three generators."""

    def __init__(self):
        self.data = toy_data()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, target = self.data[index]
        return inputs + torch.rand(()) + random.random() + float(numpy.random.rand()), target


LOADERS = {
    "random sampler": lambda: toy_loader(),
    "batch sampler of the user": lambda: torch.utils.data.DataLoader(toy_data(), batch_sampler=PythonShuffle(48, 8)),
    "augmentation": lambda: toy_loader(dataset=Noisy()),
    "augmentation in workers": lambda: toy_loader(dataset=Noisy(), num_workers=1),
    "own generator": lambda: torch.utils.data.DataLoader(
        toy_data(),
        batch_size=8,
        sampler=RandomSampler(toy_data(), generator=torch.Generator().manual_seed(os.getpid())),
    ),
}


def transfer_with_noise(self, batch, dataloader_idx):
    return [batch[0] + torch.rand(()), batch[1]]


def draw_on_rank_zero(self, outputs, batch, batch_idx):
    if self.trainer.is_global_zero:  # to show a sample, say
        torch.rand(3)
        random.random()
        numpy.random.rand()


def fit_unseeded(folder, kind):
    module = toy_module(on_after_batch_transfer=transfer_with_noise, on_train_batch_end=draw_on_rank_zero)
    module.net.insert(1, torch.nn.Dropout(0.5))
    unseed()
    toy_trainer(folder, smp={"pipeline_parallel_degree": 2, "microbatches": 2}).fit(module, LOADERS[kind]())
    return module.seen


@pytest.mark.parametrize("kind", LOADERS)
def test_unseeded_ranks_of_one_pipeline_see_the_same_batches(kind, tmp_path):
    first, second = on_ranks(fit_unseeded, 2, tmp_path, kind)
    assert first == second
    assert first[:6] != first[6:], "the second epoch must have an order of its own"


def fit_augmented(folder, smp):
    module = toy_module()
    trainer = toy_trainer(folder, smp=smp)
    random.seed(1)
    numpy.random.seed(1)
    trainer.fit(module, toy_loader(dataset=Noisy()), toy_loader())
    return module.seen, metrics_of(trainer)


def test_draws_of_the_data_path_are_those_of_one_process(tmp_path):
    with quiet():
        seen, metrics = fit_augmented(tmp_path, None)
    for found in on_ranks(fit_augmented, 2, tmp_path, {"pipeline_parallel_degree": 2, "microbatches": 2}):
        assert found[0] == seen
        assert found[1] == pytest.approx(metrics, rel=1e-5)


def fit_two_replicas(folder):
    module = toy_module()
    trainer = toy_trainer(folder, smp={"pipeline_parallel_degree": 2, "microbatches": 2}, max_epochs=1)
    trainer.fit(module, toy_loader(batch_size=4), toy_loader(shuffle=False, batch_size=4))
    mesh = trainer.strategy.mesh
    return mesh.dp_rank, module.seen, metrics_of(trainer), trainer.strategy.engine.saved.full_state_dict()


def test_replicas_share_the_samples_and_average_the_gradients(tmp_path):
    results = on_ranks(fit_two_replicas, 4, tmp_path)
    by_replica = {0: [], 1: []}
    for replica, seen, _, _ in results:
        by_replica[replica].append(seen)
    for seen in by_replica.values():
        assert seen[0] == seen[1]
    samples = [sample for seen in (by_replica[0][0], by_replica[1][0]) for batch in seen for sample in batch]
    assert sorted(samples) == sorted(toy_data().tensors[0][:, 0].tolist())

    # One process that reads both halves of each global batch takes the same steps.
    inputs, targets = toy_data().tensors
    row = {value: index for index, value in enumerate(inputs[:, 0].tolist())}
    module = toy_module()
    optimizer = module.configure_optimizers()["optimizer"]
    for halves in zip(by_replica[0][0], by_replica[1][0], strict=True):
        rows = [row[value] for half in halves for value in half]
        optimizer.zero_grad()
        module.loss((inputs[rows], targets[rows])).backward()
        optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(results[0][3][name], value, rtol=1e-4, atol=1e-6)


class Augmented(Dataset):
    """Draws by a generator that the system seeds, as albumentations 2 does; the lengths of its samples differ, too."""

    def __init__(self, *, flips, pads):
        self.samples, self.generator = toy_data(24), numpy.random.default_rng()
        self.flips, self.pads = flips, pads

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, target = self.samples[index]
        if self.flips:
            inputs = inputs * self.generator.uniform(0.5, 2)
        if self.pads:
            inputs = torch.cat([inputs, torch.zeros(int(self.generator.integers(1, 9)))])
        return inputs, target


def collate(samples):
    inputs, targets = zip(*samples, strict=True)
    return torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True), torch.stack(targets)


def padded_loss(self, batch):
    return torch.nn.functional.cross_entropy(self.net(batch[0][:, :8]), batch[1])


def fit_drawn(folder, smp, draws, num_workers):
    trainer = toy_trainer(folder, smp=smp, max_epochs=2)
    module = toy_module(
        loss=padded_loss, on_train_batch_start=lambda self, batch, index: self.seen.append(batch[0].tolist())
    )
    options = {"num_workers": num_workers, "collate_fn": collate}
    trainer.fit(module, toy_loader(dataset=Augmented(**draws), batch_size=4, **options))
    return module.seen, trainer.callback_metrics["train_loss_epoch"].item()


@pytest.mark.parametrize("draws", [{"flips": True, "pads": False}, {"flips": False, "pads": True}])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("shares", [False, True])
def test_samples_drawn_by_generators_of_the_system_are_those_of_the_first_rank(shares, num_workers, draws, tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 2, "share_batches": shares}
    (mine, loss), (theirs, other_loss) = on_ranks(fit_drawn, 2, tmp_path, smp, draws, num_workers)
    assert mine == theirs
    assert loss == other_loss
    assert len(mine) == 12


class ByRank(IterableDataset):
    """Wrong: takes its share by global rank."""

    def __iter__(self):
        inputs, targets = toy_data().tensors
        for index in range(int(os.environ["RANK"]), len(inputs), 2):
            yield inputs[index], targets[index]


def fit_by_rank(folder):
    trainer = toy_trainer(folder, smp={"pipeline_parallel_degree": 2, "microbatches": 2})
    trainer.fit(toy_module(), toy_loader(dataset=ByRank(), shuffle=False))


def test_different_batches_on_the_ranks_of_one_pipeline_are_found(tmp_path):
    with pytest.raises(RuntimeError, match="Batch 0 differs between the ranks of one replica"):
        on_ranks(fit_by_rank, 2, tmp_path)


def reductions(folder):
    trainer = toy_trainer(folder, smp={"pipeline_parallel_degree": 2, "microbatches": 2}, max_epochs=1)
    before = []

    def setup(self, stage):
        before.append(float(trainer.strategy.reduce(torch.tensor(1.0), reduce_op="sum")))

    module = toy_module(setup=setup)
    trainer.fit(module, toy_loader())
    strategy, rank = trainer.strategy, trainer.global_rank
    return (
        before,
        float(strategy.reduce(torch.tensor(float(rank)))),
        module.all_gather(torch.tensor(rank)).tolist(),
        strategy.reduce_boolean_decision(rank == 1),
        strategy.reduce_boolean_decision(rank == 1, all=False),
        strategy.broadcast(f"from {rank}", src=2),
    )


def test_reductions_are_over_replicas_and_decisions_over_all(tmp_path):
    found = on_ranks(reductions, 4, tmp_path)
    assert [row[1] for row in found] == [1.0, 2.0, 1.0, 2.0]
    assert [row[2] for row in found] == [[0, 2], [1, 3]] * 2
    assert {(tuple(row[0]), *row[3:]) for row in found} == {((4.0,), False, True, "from 2")}


def test_a_checksum_sees_values_shapes_and_labels():
    batch = {"x": torch.arange(6.0), "names": ["a", "b"]}
    variants = [
        batch,
        {**batch, "x": torch.arange(6.0).reshape(2, 3)},
        {**batch, "x": torch.arange(6.0).to(torch.bfloat16)},
        {**batch, "names": ["a", "c"]},
        {**batch, "x": torch.arange(6.0).flip(0)},
    ]
    assert len({digest_of(variant, texts=True) for variant in variants}) == len(variants)
    assert digest_of(batch) == digest_of({"x": torch.arange(6.0), "names": ["a", "b"]})
