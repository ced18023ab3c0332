"""What user code divides a batch by counts replicas; Lightning's own code still sees every rank."""

import lightning as L
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning_toy import NEWER, OLDER, on_ranks, quiet, toy_data, toy_module, toy_trainer
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from smp_strategy import SMPStrategy

LAYOUTS = {
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}, 1),
    "no degree": (2, {"microbatches": 2}, 1),
    "sdp2": (2, {"sharded_data_parallel_degree": 2}, 2),
    "pp2 x 2": (4, {"pipeline_parallel_degree": 2, "microbatches": 2}, 2),
}


class Data(LightningDataModule):
    """As templates write it: the batch of each device, from what the user wants in all."""

    def setup(self, stage: str) -> None:
        self.in_setup = self.trainer.world_size

    def train_dataloader(self) -> DataLoader:
        counts = self.trainer.world_size, self.trainer.strategy.num_processes, self.trainer.strategy.world_size
        self.in_loader = counts
        return DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=8 // counts[0])


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    def on_train_batch_start(self, batch, batch_idx) -> None:
        self.samples = len(batch[0])

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        self.in_optimizers = self.trainer.world_size  # scales learning rates
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def counted(options):
    module, data = Module(), Data()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=SMPStrategy(**options),
        max_epochs=1,
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(module, data)
    return data.in_setup, data.in_loader, module.in_optimizers, module.samples, trainer.num_training_batches


@pytest.mark.parametrize("layout", LAYOUTS)
def test_user_code_is_told_the_number_of_replicas(layout):
    world, options, replicas = LAYOUTS[layout]
    for in_setup, in_loader, in_optimizers, samples, num_batches in on_ranks(counted, world, options):
        assert (in_setup, in_loader, in_optimizers) == (replicas, (replicas,) * 3, replicas)
        assert (samples, num_batches) == (8 // replicas, 4)


DEALT = {
    **LAYOUTS,
    "tp2": (2, {"tensor_parallel_degree": 2}, 1),
    "tp2 x 2": (4, {"tensor_parallel_degree": 2}, 2),
    "tp2, each reads": (2, {"tensor_parallel_degree": 2, "prescaled_batch": False}, 2),
}


class EveryNth(Sampler):
    """A sampler of the user's own; it gets its numbers in `setup`."""

    def __init__(self, size, num_readers, reader):
        self.numbers = range(reader, size, num_readers)

    def __len__(self):
        return len(self.numbers)

    def __iter__(self):
        return iter(self.numbers)


def dealt_out(folder, smp, kind, root=NEWER):
    """Weights, samples of a batch, and what `global_rank` is in hooks: to the user, and to others."""
    ranks = {}

    def setup(self, stage):
        ranks["setup"] = self.global_rank, self.trainer.strategy.global_rank
        self.numbers = self.trainer.world_size, self.trainer.global_rank

    def sampler_of(self, data):
        numbers = self.trainer.world_size, self.trainer.global_rank
        if kind == "own":
            assert numbers == self.numbers
            return EveryNth(len(data), *numbers)
        return DistributedSampler(data, *numbers, shuffle=kind == "shuffled")

    def train_dataloader(self):
        ranks["train"] = self.global_rank, self.trainer.strategy.global_rank
        ranks["is zero"] = self.trainer.is_global_zero
        data = toy_data()
        return DataLoader(data, 8 // self.trainer.world_size, sampler=sampler_of(self, data))

    def val_dataloader(self):
        ranks["val"] = self.global_rank, self.trainer.strategy.global_rank
        data = toy_data()
        return DataLoader(data, 8 // self.trainer.world_size, sampler=sampler_of(self, data))

    def on_fit_start(self):
        ranks["elsewhere"] = self.global_rank, self.trainer.strategy.global_rank
        ranks["called"] = len(self.train_dataloader())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    hooks = {"setup": setup, "train_dataloader": train_dataloader, "val_dataloader": val_dataloader}
    module = toy_module(root, validation_step=validation_step, on_fit_start=on_fit_start, **hooks)
    trainer = toy_trainer(folder, root, smp=smp, num_sanity_val_steps=0, use_distributed_sampler=kind != "own")
    trainer.fit(module)
    return ranks, module.state_dict(), float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize(
    ("layout", "kind"),
    [*((layout, "plain") for layout in DEALT), ("pp2 x 2", "shuffled"), ("pp2", "own"), ("tp2 x 2", "own")],
)
def test_samples_are_dealt_out_by_the_number_of_the_replica(layout, kind, tmp_path):
    world, options, replicas = DEALT[layout]
    with quiet():
        _, weights, loss = dealt_out(tmp_path / "one", None, kind)
    found = on_ranks(dealt_out, world, tmp_path / "smp", options, kind)
    numbers = [ranks["train"][0] for ranks, _, _ in found]
    assert sorted(numbers) == sorted(list(range(replicas)) * (world // replicas))
    for rank, (ranks, found_weights, found_loss) in enumerate(found):
        for hook in ("setup", "train", "val"):
            assert ranks[hook] == (numbers[rank],) * 2
        assert ranks["elsewhere"] == (rank, rank)
        assert ranks["is zero"] == (rank == 0)
        assert ranks["called"] == 6
        torch.testing.assert_close(found_weights, weights, rtol=1e-4, atol=1e-5)
        assert found_loss == pytest.approx(loss, rel=1e-4)


def test_the_older_lightning_deals_out_alike(tmp_path):
    pytest.importorskip(OLDER)
    found = on_ranks(dealt_out, 2, tmp_path, DEALT["pp2"][1], "plain", OLDER)
    assert [(ranks["train"], ranks["elsewhere"]) for ranks, _, _ in found] == [((0, 0), (0, 0)), ((0, 0), (1, 1))]


def named_in_datamodule(folder):
    """As a datamodule asks, in all of its hooks; a callback, a dataset that is read, and Lightning see ranks."""
    ranks = {}

    class Asking(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, number):
            ranks["read"] = trainer.global_rank
            return torch.ones(8)

    class Numbered(LightningDataModule):
        def prepare_data(self):
            ranks["prepared"] = True

        def setup(self, stage):
            ranks["setup"] = self.trainer.global_rank

        def predict_dataloader(self):
            ranks["predict"] = self.trainer.global_rank
            return DataLoader(Asking(), batch_size=2)

        def test_dataloader(self):
            ranks["test"] = self.trainer.global_rank
            return DataLoader(Asking(), batch_size=2)

    class Watching(L.Callback):
        def setup(self, trainer, module, stage):
            ranks["callback"] = trainer.global_rank

    module = Module()
    module.predict_step = lambda batch, batch_idx: module.net(batch)
    module.test_step = lambda batch, batch_idx: module.log("out", module.net(batch).mean())
    trainer = toy_trainer(folder, smp=LAYOUTS["pp2"][1], callbacks=[Watching()])
    trainer.test(module, Numbered(), verbose=False)
    trainer.predict(module, Numbered())
    return ranks


def test_datamodules_are_told_the_replica_and_callbacks_the_rank(tmp_path):
    for rank, ranks in enumerate(on_ranks(named_in_datamodule, 2, tmp_path)):
        assert (ranks["setup"], ranks["test"], ranks["predict"]) == (0, 0, 0)
        assert (ranks["callback"], ranks["read"]) == (rank, rank)
        assert ("prepared" in ranks) == (rank == 0)
