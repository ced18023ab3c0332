"""A small LightningModule, its data, and a way to train it on N ranks or on one, the plain way."""

import contextlib
import os
import random
import warnings
from importlib import import_module

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from smp_strategy.distributed import deadlock as watch
from smp_strategy.errors import SMPError
from smp_strategy.integrations.lightning import make_strategy
from smp_strategy.testing import run_ranks

NEWER, OLDER = "lightning.pytorch", "pytorch_lightning"
FEATURES, CLASSES = 8, 4
make_strategy(NEWER)  # what it imports costs a second, and forked ranks have it already


def toy_data(samples: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (samples,), generator=generator))


def toy_loader(*, shuffle: bool = True, batch_size: int = 8, dataset: Dataset | None = None, **options) -> DataLoader:
    return DataLoader(dataset or toy_data(), batch_size=batch_size, shuffle=shuffle, **options)


def shared_loader(trainer, smp: dict | None, *, batch_size: int = 8, dataset: Dataset | None = None) -> DataLoader:
    """In order; the replicas read each batch of one process together. For ``use_distributed_sampler=False``."""
    dataset = dataset or toy_data()
    degrees = {} if smp is None else smp
    num = 1 if smp is None else int(os.environ.get("WORLD_SIZE", 1))
    num //= degrees.get("pipeline_parallel_degree", 1) * degrees.get("tensor_parallel_degree", 1)

    class Shared(torch.utils.data.Sampler):
        def __iter__(self):
            rank = 0 if num == 1 else trainer.strategy.distributed_sampler_kwargs["rank"]
            return (number for number in range(len(dataset)) if number // (batch_size // num) % num == rank)

        def __len__(self):
            return len(dataset) // num

    return DataLoader(dataset, batch_size=batch_size // num, sampler=Shared())


def toy_module(root: str = NEWER, *, seed: int = 0, **overrides):
    """A module of the tree ``root`` without a trace of parallelism; ``overrides`` replace its methods."""
    lightning = import_module(root)

    class Toy(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                *(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()),
                *(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)),
            )
            self.seen = []  # what reached the steps of this rank

        def loss(self, batch):
            inputs, targets = batch
            return nn.functional.cross_entropy(self.net(inputs), targets)

        def on_train_batch_start(self, batch, batch_idx):
            self.seen.append(batch[0][:, 0].tolist())

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log_dict({"val_loss": self.loss(batch)}, batch_size=len(batch[0]))

        def test_step(self, batch, batch_idx):
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

        def configure_optimizers(self):
            # Not a tiny eps: Adam would blow the rounding of another order of additions up where gradients are tiny.
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)
            return {
                "optimizer": optimizer,
                "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
            }

    torch.manual_seed(seed)
    random.seed(seed)
    return type("Toy", (Toy,), overrides)()


def toy_trainer(folder, root: str = NEWER, *, smp: dict | None = None, **options):
    """A quiet Trainer: plain if ``smp`` is None, else with the strategy and these options."""
    lightning = import_module(root)
    ranks = int(os.environ.get("WORLD_SIZE", 1)) if smp is not None else 1
    defaults = {
        "accelerator": "cpu",
        "strategy": "auto" if smp is None else make_strategy(root)(**smp),
        "devices": ranks,
        "default_root_dir": folder,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return lightning.Trainer(**{**defaults, **options})


@contextlib.contextmanager
def quiet():
    """Lightning advises on workers, shuffling and so on; that is not the subject here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def error_of(train) -> str:
    """The error of this package that ends ``train``, where ranks look around early; "nothing" if it ends well."""
    watch.PATIENCE_SECONDS, watch.PAUSE_SECONDS = 1.5, 0.2
    try:
        with quiet():
            train()
    except SMPError as error:
        return str(error)
    return "nothing"


def on_ranks(body, world_size: int, *args, timeout: float = 150.0, **options):
    """``run_ranks`` with Lightning's warnings ignored."""
    return run_ranks(_quietly, world_size, body, args, options, timeout=timeout)


def _quietly(body, args, options):
    with quiet():
        return body(*args, **options)


def metrics_of(trainer) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
