"""Runs that are interrupted anywhere, for the tests of resuming.

One run goes through and writes a checkpoint at every moment at which anybody could; each of them is then resumed by new
objects whose generators are elsewhere. What is compared is the whole checkpoint of the end: weights, the optimizers'
state, schedulers, callbacks, counters, random states.
"""

import os
import random
from pathlib import Path

import numpy
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning_toy import toy_data, toy_loader, toy_module, toy_trainer
from torch.utils.data import Dataset

from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.engine.saving.rank_generators import are_equal

SAMPLES = 24


class Noisy(Dataset):
    """Augments with all three generators."""

    def __init__(self):
        self.data = toy_data(SAMPLES)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, target = self.data[index]
        return inputs + 0.1 * (torch.rand(()) + random.random() + float(numpy.random.rand())), target


class Saver(Checkpoint):  # whose hooks Lightning calls last
    """Writes a checkpoint at every moment."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.moments = []

    def save(self, trainer, hook):
        self.moments.append(f"{len(self.moments):02}-{hook}")
        trainer.save_checkpoint(self.folder / f"{self.moments[-1]}.ckpt")

    def on_train_batch_end(self, trainer, *rest):
        self.save(trainer, "batch")

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, module):
        self.save(trainer, "epoch")


def transfer_with_noise(self, batch, dataloader_idx):
    return [batch[0] + 0.1 * torch.rand(()), batch[1]]


def draw_on_rank_zero(self, batch, batch_idx):
    if self.trainer.is_global_zero:  # to show a sample, say
        random.random()
        numpy.random.rand()


def plateau(self):
    optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.2)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def noisy_module(**overrides):
    hooks = {"on_after_batch_transfer": transfer_with_noise, "on_train_batch_start": draw_on_rank_zero}
    module = toy_module(**{**hooks, **overrides})
    module.net.insert(1, torch.nn.Dropout(0.2))
    return module


def unseed():
    seed = int.from_bytes(os.urandom(4), "big")
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def validation():
    return toy_loader(dataset=toy_data(16), shuffle=False)


def run(folder, smp, loader, overrides=None, checkpoint=None, callbacks=(), validates=True, is_noisy=True, **options):
    """A run from the start or from ``checkpoint``; returns the content of its last checkpoint."""
    if checkpoint is None:
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(3)
    else:
        unseed()
    module = (noisy_module if is_noisy else toy_module)(**(overrides or {}))
    if checkpoint is not None:
        unseed()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(float("nan"))
    saves = any(isinstance(each, Checkpoint) for each in callbacks)
    trainer = toy_trainer(folder, smp=smp, callbacks=list(callbacks), enable_checkpointing=saves, **options)
    trainer.fit(module, loader(), validation() if validates else None, ckpt_path=checkpoint)
    target = Path(folder) / ("start.ckpt" if checkpoint is None else "resumed.ckpt")
    trainer.save_checkpoint(target)
    return content(target)


def content(path):
    """All of a checkpoint of either form."""
    if path.is_file():
        return torch.load(path, weights_only=True)
    stored = CheckpointReader.open(path)
    return {"stored": {name: stored.read(name) for name in stored.tensors}, "rest": stored.rest()}


def differences(found, expected, path=""):
    """Where two contents differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = [*expected, *(key for key in found if key not in expected)]
        missing = [f"{path}/{key} is missing" for key in keys if key not in found or key not in expected]
        both = [key for key in keys if key in found and key in expected]
        return missing + [each for key in both for each in differences(found[key], expected[key], f"{path}/{key}")]
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)) and len(found) == len(expected):
        pairs = zip(found, expected, strict=True)
        return [each for number, pair in enumerate(pairs) for each in differences(*pair, f"{path}/{number}")]
    return [] if are_equal(found, expected) else [f"{path}: {str(found)[:60]} instead of {str(expected)[:60]}"]


def interrupted_everywhere(folder, smp, loader, chosen=slice(None), callbacks=list, **options):
    """For each chosen moment what differs at the end, from the checkpoint of the uninterrupted run.

    After the last moment there is nothing left to do.
    """
    folder = Path(folder)
    saver = Saver(folder)
    expected = run(folder, smp, loader, callbacks=[saver, *callbacks()], **options)
    found = {}
    for moment in saver.moments[:-1][chosen]:
        again = [Saver(folder / "again"), *callbacks()]
        end = run(folder, smp, loader, checkpoint=folder / f"{moment}.ckpt", callbacks=again, **options)
        found[moment] = differences(end, expected)
    assert found
    return found
