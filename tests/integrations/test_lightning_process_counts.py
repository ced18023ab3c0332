"""What user code divides a batch by counts replicas; Lightning's own code still sees every rank."""

import lightning as L
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning_toy import on_ranks
from torch.utils.data import DataLoader, TensorDataset

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
