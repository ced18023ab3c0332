"""``torch.autograd.grad`` in the step: gradient penalties and derivatives with respect to the inputs."""

import re

import pytest
import torch
from lightning_toy import error_of, on_ranks, shared_loader, toy_module, toy_trainer
from torch import nn

import smp_strategy

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
ONE_STAGE = {
    "replicas": {"pipeline_parallel_degree": 1},
    "zero1": {"pipeline_parallel_degree": 1, "shard_optimizer_state": True},
    "sdp2": {"sharded_data_parallel_degree": 2, "sdp_gather": "step"},
    "tp2": {"tensor_parallel_degree": 2},
    "recomputed": {"pipeline_parallel_degree": 1, "activation_checkpointing": "all"},
}


def stack(out):
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, out))


def penalty(module, inputs):
    """As in WGAN-GP."""
    point = (0.5 * inputs + 0.5 * module.net(inputs).repeat(1, 2).detach()).requires_grad_()
    verdict = module.critic(point)
    (slope,) = torch.autograd.grad(verdict, point, torch.ones_like(verdict), create_graph=True, retain_graph=True)
    return (slope.norm(2, dim=1) - 1).square().mean() + module.critic(inputs).mean()


def derivatives(module, inputs):
    """As in networks for differential equations: of the second order, by tensors that the step joins."""
    x, t = (part.clone().requires_grad_() for part in inputs.chunk(2, 1))
    u = module.critic(torch.cat([x, t], 1).sin())
    (of_x,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    (twice,) = torch.autograd.grad(of_x[:, 0].sum(), x, create_graph=True)
    of_t, nothing = torch.autograd.grad(
        u.sum(), (t, torch.ones(1, requires_grad=True)), None, None, True, allow_unused=True
    )
    of_t = of_t if nothing is None else of_t + nothing.sum()
    return (of_t + twice).square().mean()


def slopes_only(module, inputs):
    """Without a second backward."""
    point = module.net(inputs).repeat(1, 2).detach().requires_grad_()
    (slope,) = torch.autograd.grad(module.critic(point).sum(), point)
    assert not slope.requires_grad
    return module.critic(inputs + slope).square().mean()


def train(folder, smp, extra, is_whole=True):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) + extra(self, batch[0])

    def validation_step(self, batch, batch_idx):
        pass

    module = toy_module(training_step=training_step, validation_step=validation_step)
    torch.manual_seed(0)
    module.critic = stack(1)
    if is_whole:
        module.net, module.critic = smp_strategy.unit(module.net), smp_strategy.unit(module.critic)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, shared_loader(trainer, smp))
    return {name: value.clone() for name, value in module.state_dict().items()}


IN_STEP = [(extra, smp) for extra in (penalty, derivatives, slopes_only) for smp in ONE_STAGE.values()]


@pytest.mark.parametrize(("extra", "smp"), [*IN_STEP, (penalty, PP2), (slopes_only, PP2)])
def test_gradients_in_the_step_are_those_of_one_process(tmp_path, extra, smp):
    (expected,) = on_ranks(train, 1, tmp_path, None, extra)
    for found in on_ranks(train, 2, tmp_path, smp, extra):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def of_weights(module, inputs):
    return torch.autograd.grad(module.net(inputs).sum(), next(module.net.parameters()), create_graph=True)[0].sum()


def across(module, inputs):
    point = inputs.clone().requires_grad_()
    return torch.autograd.grad(module.critic(module.net(point).repeat(1, 2)).sum(), point, create_graph=True)[0].sum()


REFUSED = {
    "graph on two stages": (across, True, PP2, "parts of the graph .* several pipeline stages.*is a unit"),
    "by way of the glue": (derivatives, True, PP2, "parts of the graph"),
    "weights of a stage": (of_weights, True, PP2, "gradient of a parameter.*some of the stages only"),
    "weights in parts": (of_weights, False, {"tensor_parallel_degree": 2}, "gradient of a parameter.*have parts"),
    "gathered for each use": (penalty, True, {"sharded_data_parallel_degree": 2}, "Set `sdp_gather=step`"),
}


def refused(folder, smp, extra, is_whole):
    return error_of(lambda: train(folder, smp, extra, is_whole))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_its_graph_on_several_ranks_is_refused(tmp_path, name):
    extra, is_whole, smp, message = REFUSED[name]
    for found in on_ranks(refused, 2, tmp_path, smp, extra, is_whole):
        assert re.search(message, found), found
