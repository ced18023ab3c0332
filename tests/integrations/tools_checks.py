"""Checkpoints of several writers, for the tests of the command ``smp``."""

import torch
import torch.distributed.checkpoint as dcp
from lightning_toy import toy_loader, toy_module, toy_trainer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from smp_strategy.cli import main

__all__ = ["Tied", "fsdp_directory", "smp", "train"]


def smp(*arguments):
    """The exit status."""
    return main([str(argument) for argument in arguments])


def train(folder, options, epochs=1, resume=None):
    """Fit the toy with this package's strategy, or without it, and save ``folder/name.ckpt``; returns its weights."""
    module = toy_module()
    trainer = toy_trainer(folder, smp=options, max_epochs=epochs)
    trainer.fit(module, toy_loader(shuffle=False), ckpt_path=resume)
    trainer.save_checkpoint(folder / ("plain.ckpt" if options is None else "ours.ckpt"))
    return {name: value.clone() for name, value in module.state_dict().items()} if options is None else None


class Tied(nn.Module):
    """An embedding that is the last layer as well, a norm with buffers, and layers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 6))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, numbers):
        return self.head(self.layers(self.embedding(numbers)))


def fsdp_directory(path, keys):
    """Train two steps under FSDP on all ranks and save, with the model under ``keys[0]``; returns what was saved.

    Args:
        path: the directory.
        keys: of the model and of the optimizer; no keys: the bare state dict of the model.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, kept = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    if keys:
        dcp.save(dict(zip(keys, (weights, kept), strict=True)), checkpoint_id=path)
    else:
        dcp.save(weights, checkpoint_id=path)
    whole = {name: value.full_tensor() for name, value in weights.items()}
    moments = {
        name: {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in entries.items()}
        for name, entries in kept["state"].items()
    }
    return whole, moments
