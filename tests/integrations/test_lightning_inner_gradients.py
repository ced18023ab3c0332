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


def langevin(module, inputs):
    """Samples of an energy-based model: the weights are frozen meanwhile, and steps follow the gradient."""
    for parameter in module.critic.parameters():
        parameter.requires_grad = False
    point = module.net(inputs).repeat(1, 2).detach()
    point.requires_grad = True
    for _ in range(2):
        (slope,) = torch.autograd.grad(module.critic(point).sum(), point)
        point = (point + 0.1 * slope.clamp(-0.3, 0.3)).detach()
        point.requires_grad = True
    for parameter in module.critic.parameters():
        parameter.requires_grad = True
    return module.critic(point.detach()).mean() - module.critic(inputs).mean()


class InnerLoop(nn.Module):
    """As in MAML, with `backward` for the inputs and `grad` for the weights."""

    def __init__(self, learner):
        super().__init__()
        self.learner = learner

    def forward(self, inputs):
        with torch.enable_grad():
            point = inputs.detach().requires_grad_()
            self.learner(point).sum().backward(inputs=[point])
            fast = dict(self.learner.named_parameters())
            for _ in range(2):
                error = torch.func.functional_call(self.learner, fast, (inputs,)).square().sum(1).sum()
                slopes = torch.autograd.grad(error, list(fast.values()), create_graph=True)
                fast = {name: weight - 1e-3 * slope for (name, weight), slope in zip(fast.items(), slopes, strict=True)}
        return torch.func.functional_call(self.learner, fast, (inputs + 0.1 * point.grad,))


def inner_loop(module, inputs):
    return module.critic(module.net(inputs).repeat(1, 2)).square().mean()


def train(folder, smp, extra, is_whole=True):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) + extra(self, batch[0])

    def validation_step(self, batch, batch_idx):
        pass

    module = toy_module(training_step=training_step, validation_step=validation_step)
    torch.manual_seed(0)
    module.critic = InnerLoop(stack(1)) if extra is inner_loop else stack(1)
    if is_whole:
        module.net, module.critic = smp_strategy.unit(module.net), smp_strategy.unit(module.critic)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, shared_loader(trainer, smp))
    return {name: value.clone() for name, value in module.state_dict().items()}


IN_STEP = [(extra, smp) for extra in (penalty, derivatives, slopes_only, langevin) for smp in ONE_STAGE.values()]


@pytest.mark.parametrize(("extra", "smp"), [*IN_STEP, *((each, PP2) for each in (penalty, slopes_only, langevin))])
def test_gradients_in_the_step_are_those_of_one_process(tmp_path, extra, smp):
    (expected,) = on_ranks(train, 1, tmp_path, None, extra)
    for found in on_ranks(train, 2, tmp_path, smp, extra):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def of_weights(module, inputs):
    return torch.autograd.grad(module.net(inputs).sum(), next(module.net.parameters()), create_graph=True)[0].sum()


def across(module, inputs):
    point = inputs.clone().requires_grad_()
    return torch.autograd.grad(module.critic(module.net(point).repeat(1, 2)).sum(), point, create_graph=True)[0].sum()


@pytest.mark.parametrize("smp", [PP2 | {"microbatches": 1}, ONE_STAGE["replicas"] | {"microbatches": 1}])
def test_an_inner_loop_in_a_unit_is_that_of_one_process(tmp_path, smp):
    num_ranks = smp["pipeline_parallel_degree"]  # the loop learns from all of its batch, so there is one replica
    (expected,) = on_ranks(train, 1, tmp_path, None, inner_loop)
    for found in on_ranks(train, num_ranks, tmp_path, smp, inner_loop):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def probed(folder, smp, is_read):
    torch.manual_seed(1)
    probe = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            features = self.net(batch[0])
        if is_read:
            features = torch.from_numpy(features.detach().cpu().numpy())
        probe(features).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    module = toy_module(on_train_batch_end=on_train_batch_end)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False)
    error = error_of(lambda: trainer.fit(module, shared_loader(trainer, smp)))
    return error, probe.weight.detach().clone()


def test_a_probe_beside_the_model_takes_values(tmp_path):
    ((_, expected),) = on_ranks(probed, 1, tmp_path, None, True)
    for error, found in on_ranks(probed, 2, tmp_path, PP2, True):
        assert error == "nothing"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for error, _ in on_ranks(probed, 2, tmp_path, PP2, False):
        assert re.search(r"`backward` of a placed tensor.*A probe .*torch\.from_numpy", error), error


def backward_inside(module, inputs):
    """As in ProtoMAML."""
    features = module.net(inputs)
    weight = features.detach().clone()
    weight.requires_grad = True
    (features @ weight.T).square().sum().backward()
    return weight.sum()


def weights_of_the_step(module, inputs):
    fast = {name: 0.9 * weight for name, weight in module.critic.named_parameters()}
    scale = module.net(inputs).mean()
    fast["4.bias"] = fast["4.bias"] * scale
    return torch.func.functional_call(module.critic, fast, (inputs,)).mean()


REFUSED = {
    "backward inside": (backward_inside, True, PP2, "`backward` .*the `forward` of a module that is a unit"),
    "weights of the step": (
        weights_of_the_step,
        True,
        ONE_STAGE["replicas"],
        "meets a placed tensor.*the `forward` of a module that is a",
    ),
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
