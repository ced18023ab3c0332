"""``prescaled_batch=False`` under Lightning: samples are dealt out to all ranks but the stages."""

import pytest
import torch
from lightning_toy import metrics_of, on_ranks, quiet, toy_data, toy_loader, toy_module, toy_trainer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from smp_strategy.errors import SMPError

OWN = {
    "pipeline_parallel_degree": 1,
    "tensor_parallel_degree": 2,
    "tensor_parallel": {"net.0": "column", "net.2": "row", "net.4": "column", "net.6": "row"},
    "prescaled_batch": False,
}
LAYOUTS = {
    "2 parts": (2, OWN),
    "2 parts of 2 stages": (4, {**OWN, "pipeline_parallel_degree": 2, "microbatches": 2}),
    "2 parts of 2 replicas": (4, OWN),
}
SAMPLES = 44
"""No multiple of a batch of all ranks: the last one is smaller."""


def loader(batch_size):
    return toy_loader(shuffle=False, batch_size=batch_size, dataset=toy_data(SAMPLES))


class OfAllReaders(BatchSampler):
    """What all readers together have in a batch, whose samples Lightning shuffles and deals out."""

    def __init__(self, readers):
        self.samplers = [DistributedSampler(range(SAMPLES), readers, reader) for reader in range(readers)]
        self.size, self.epoch = 8 // readers, 0

    def __len__(self):
        return -(-SAMPLES // 8)

    def __iter__(self):
        for sampler in self.samplers:
            sampler.set_epoch(self.epoch)
        self.epoch += 1
        for batches in zip(*(BatchSampler(each, self.size, False) for each in self.samplers), strict=True):
            yield sum(batches, [])


def fit_and_look(folder, smp, readers):
    """Metrics of training, validation and test, weights, predictions, and how many samples were in a batch."""
    batch_size = 8 // readers if smp else 8
    train = loader(batch_size) if smp else DataLoader(toy_data(SAMPLES), batch_sampler=OfAllReaders(readers))
    module = toy_module(train_dataloader=lambda self: train, val_dataloader=lambda self: loader(batch_size))
    trainer = toy_trainer(folder, smp=smp, max_epochs=2)
    trainer.fit(module)
    found = metrics_of(trainer)
    found |= trainer.test(module, loader(batch_size), verbose=False)[0]
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    predicted = torch.cat(trainer.predict(module, loader(batch_size)))
    return found, weights, predicted, [len(batch) for batch in module.seen]


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_and_weights_are_those_of_one_process_with_the_batches_of_all_ranks(layout, tmp_path):
    num_ranks, smp = LAYOUTS[layout]
    readers = num_ranks // smp["pipeline_parallel_degree"]
    with quiet():
        metrics, weights, predicted, sizes = fit_and_look(tmp_path / "one", None, readers)
    ranks = on_ranks(fit_and_look, num_ranks, tmp_path / "smp", smp, readers)
    assert SAMPLES % 8
    for found, found_weights, found_predicted, found_sizes in ranks:
        assert found_sizes == [size // readers for size in sizes]
        torch.testing.assert_close(found_weights, weights, rtol=1e-5, atol=1e-6)
        if layout != "2 parts of 2 replicas":  # those average what they log if they are asked to, and predict their own
            assert found == pytest.approx(metrics, rel=1e-5)
            torch.testing.assert_close(found_predicted, predicted, rtol=1e-5, atol=1e-6)
    if layout != "2 parts of 2 replicas":
        assert len({tuple(found.values()) for found, *_ in ranks}) == 1


class Stream(IterableDataset):
    """Batches of different sizes on each rank, of which ranks may have different numbers."""

    def __init__(self, module, sizes):
        self.module, self.sizes = module, sizes

    def __iter__(self):
        reader = self.module.trainer.strategy.distributed_sampler_kwargs["rank"]
        generator = torch.Generator().manual_seed(reader)
        for size in self.sizes[reader]:
            yield torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def fit_streams(folder, sizes):
    module = toy_module(train_dataloader=lambda self: DataLoader(Stream(self, sizes), batch_size=None))
    trainer = toy_trainer(folder, smp=OWN, max_epochs=1, limit_val_batches=0)
    try:
        trainer.fit(module)
    except SMPError as error:
        return str(error)
    return metrics_of(trainer)


def test_values_of_an_epoch_are_the_same_on_ranks_with_different_numbers_of_samples(tmp_path):
    first, second = on_ranks(fit_streams, 2, tmp_path, [(1, 4, 2), (3, 1, 5)])
    assert first == second
    assert first["train_loss_epoch"] > 0


def test_ranks_with_different_numbers_of_batches_say_so_instead_of_waiting(tmp_path):
    messages = on_ranks(fit_streams, 2, tmp_path, [(2, 2, 2), (2, 2)], timeout=60.0)
    assert "do not have the same number of batches (one more, none left)" in messages[0]
    assert messages[0] == messages[1]


def fit_sized(folder):
    samples = {0: 24, 1: 16}

    def train_dataloader(self):
        return toy_loader(dataset=toy_data(samples[self.trainer.global_rank]), shuffle=False)

    module = toy_module(train_dataloader=train_dataloader)
    trainer = toy_trainer(folder, smp=OWN, max_epochs=1, limit_val_batches=0, use_distributed_sampler=False)
    with pytest.raises(SMPError, match="the number of batches of an epoch: 3 on rank 0, 2 on rank 1"):
        trainer.fit(module)


def test_loaders_of_different_lengths_are_refused_before_the_first_batch(tmp_path):
    on_ranks(fit_sized, 2, tmp_path, timeout=60.0)
