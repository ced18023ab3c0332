"""A module that one kind of step calls as a whole, and another in parts: an autoencoder, slices of a Sequential."""

import pytest
import torch
from lightning_toy import error_of, on_ranks, quiet, shared_loader, toy_module, toy_trainer
from torch import nn

import smp_strategy

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
SDP2 = {"sharded_data_parallel_degree": 2}


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
        self.dec = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8))

    def forward(self, x):
        return self.dec(self.enc(x))


def whole(self, batch):
    return (self.net(batch[0]) - batch[0]).square().mean()


def in_parts(self, batch):
    code = self.net.enc(batch[0])
    return (self.net.dec(code) - batch[0]).square().mean() + nn.functional.cross_entropy(code, batch[1])


def in_slices(self, batch):
    features = self.net[:3](batch[0])
    return nn.functional.cross_entropy(self.net[3:](features), batch[1]) + 0.1 * features.square().mean()


def of_all(self, batch):
    return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def twice(first, second):
    """A step of manual optimization that updates twice."""

    def training_step(self, batch, batch_idx):
        for loss in (first, second):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss(self, batch))
            optimizer.step()

    return training_step


def train(folder, smp, evaluated, trained, second=None, marked=False, sanity=2):
    steps = {"training_step": lambda self, batch, batch_idx: trained(self, batch)}
    if second is not None:
        steps = {"training_step": twice(trained, second), "automatic_optimization": False}
    module = toy_module(
        validation_step=lambda self, batch, batch_idx: self.log("val", evaluated(self, batch), sync_dist=True),
        configure_optimizers=lambda self: torch.optim.Adam(self.parameters(), lr=0.05, eps=1e-3),
        **steps,
    )
    if trained is not in_slices:
        torch.manual_seed(1)
        module.net = Autoencoder()
        if marked:
            smp_strategy.unit(module.net.enc), smp_strategy.unit(module.net.dec)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, num_sanity_val_steps=sanity, use_distributed_sampler=False)
    trainer.fit(module, shared_loader(trainer, smp), shared_loader(trainer, smp))
    values = {name: value.clone() for name, value in module.state_dict().items()}
    used_in_parts = None if smp is None else len(trainer.strategy.engine.layout.used_by_glue)
    return values | {"val": trainer.callback_metrics["val"].clone()}, used_in_parts


CASES = {
    "parts": (whole, in_parts),
    "slices": (of_all, in_slices),
    "updates in turn": (whole, in_parts, whole),
    "marked parts": (whole, in_parts, None, True),
}


@pytest.mark.parametrize("smp", [PP2, SDP2], ids=["pp2", "sdp2"])
@pytest.mark.parametrize("name", CASES)
def test_training_in_parts_follows_validation_of_the_whole(tmp_path, name, smp):
    with quiet():
        ((expected, _),) = on_ranks(train, 1, tmp_path, None, *CASES[name])
    for found, used_in_parts in on_ranks(train, 2, tmp_path, smp, *CASES[name]):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        # Layers that two stages divide are units of their own, as marked ones are.
        assert bool(used_in_parts) == (smp is SDP2 and name != "marked parts")


def refused(folder):
    return error_of(lambda: train(folder, SDP2, in_parts, whole, sanity=0))


def test_parts_that_are_first_used_when_optimizers_have_state_are_refused_with_the_remedy(tmp_path):
    for found in on_ranks(refused, 2, tmp_path):
        assert "The step computes with `net.enc.0.weight` outside of its unit" in found
        assert "mark them (`self.part = smp_strategy.unit(...)`)" in found
