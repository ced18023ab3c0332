"""Hooks draw the random numbers of one process, and leave the global generators where one process does."""

import random
from importlib import import_module

import numpy as np
import pytest
import torch
from lightning_toy import CLASSES, FEATURES, NEWER, on_ranks, quiet, toy_loader, toy_module, toy_trainer
from torch import nn
from torch.nn import functional as F

callbacks = import_module(f"{NEWER}.callbacks")
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
PP3 = {"pipeline_parallel_degree": 3, "microbatches": 4}
SPLIT = {"net.0": "column", "net.2": "row"}
LAYOUTS = {
    "pp2": (2, PP2),
    "pp3": (3, PP3),
    "pp2 1f1b": (2, {**PP2, "microbatches": 4, "pipeline": "1f1b"}),
    "pp2 dp2": (4, PP2),
    "sdp2": (2, {"sharded_data_parallel_degree": 2}),
    "pp2 sdp2": (4, {**PP2, "sharded_data_parallel_degree": 2}),
    "tp2": (2, {"tensor_parallel_degree": 2, "tensor_parallel": SPLIT}),
    "pp2 tp2": (4, {**PP2, "tensor_parallel_degree": 2, "tensor_parallel": SPLIT}),
}


class Jitter(nn.Module):
    """Draws from Python's and numpy's generators; only where it is asked to."""

    is_on = False

    def forward(self, x):
        return x * (1 + random.random() + np.random.rand()) if self.is_on else x


def module_of(noisy):
    """Weights stay what they are: the numbers are the subject."""
    module = toy_module(configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.0))
    if noisy:
        module.net.insert(1, Jitter())
        module.net.insert(4, nn.Dropout(0.5))
        module.net.insert(7, Jitter())
    return module


def samples(model, h):
    """Of what the model has returned."""
    p = h.softmax(-1)
    yield torch.multinomial(p, 5, replacement=True)
    yield torch.multinomial(p, 2)
    yield torch.distributions.Categorical(logits=h).sample()
    yield torch.distributions.Normal(h, 2.0).sample()
    yield torch.bernoulli(p)
    yield torch.ones(3, CLASSES).bernoulli_(p)
    yield torch.normal(h, 1.0)
    yield torch.poisson(4 * p)
    yield F.gumbel_softmax(h)
    yield F.rrelu(h, training=True)
    yield F.dropout(h[h > 0], 0.5)


def noise(model, h):
    """Of the size of what the model has returned."""
    yield torch.rand_like(h)
    yield torch.randint_like(h, 9)
    yield F.dropout(h, 0.5)
    yield F.dropout(h, 0.5, training=False)
    yield F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.5)
    yield torch.empty_like(h).exponential_()
    yield h.clone().bernoulli_(0.3)
    yield h.clone().random_(7)
    yield torch.randn(h.shape) + h


def of_weights(model, h):
    """Of the size of weights, of several stages."""
    first, *_, last = [part.weight for part in model.net if isinstance(part, nn.Linear)]
    for weight in (first, last, first):
        yield weight + torch.randn_like(weight)
        yield F.dropout(weight, 0.5)
        yield nn.init.kaiming_uniform_(weight.detach().clone())
        yield torch.zeros_like(weight).log_normal_()
        yield torch.multinomial(weight.abs(), 2)
    yield F.dropout(last[last > 0], 0.5)
    yield F.dropout(last @ torch.ones(16), 0.5) + h.sum()


def from_their_own(model, h):
    """From generators that are given."""
    generator, other = (torch.Generator().manual_seed(seed) for seed in (3, 4))
    first, *_, last = [part.weight for part in model.net if isinstance(part, nn.Linear)]
    yield torch.multinomial(h.softmax(-1), 2, generator=generator)
    yield torch.rand(3, generator=generator)
    yield torch.bernoulli(h.softmax(-1), generator=other)
    yield first.detach().clone().normal_(generator=generator)
    yield last.detach().clone().uniform_(generator=generator)
    yield torch.rand(3, generator=other)
    yield torch.rand(3, generator=generator)


KINDS = [samples, noise, of_weights, from_their_own]


class Draws(callbacks.Callback):
    """What a hook draws of each kind, with what the global generators give in between."""

    def __init__(self, when, kinds, noisy):
        self.kinds, self.noisy, self.num_calls = kinds, noisy, 0
        self.found = {kind.__name__: [] for kind in kinds}
        setattr(self, when, self.draw)

    def draw(self, trainer, pl_module, *others):
        self.num_calls += 1
        self.switch(pl_module, self.noisy)
        for kind in self.kinds:
            torch.manual_seed(self.num_calls)
            random.seed(1)
            np.random.seed(2)
            with torch.no_grad():
                self.found[kind.__name__] += self.drawn(kind, pl_module)
        self.switch(pl_module, False)

    def drawn(self, kind, pl_module):
        h = pl_module.net(torch.linspace(-1, 1, 3 * FEATURES).view(3, FEATURES))
        for drawn in kind(pl_module, h):
            yield from (drawn.tolist(), torch.rand(()).item(), random.random(), np.random.rand())
        yield pl_module.net(torch.ones(1, FEATURES)).tolist()
        yield from (random.gauss(), np.random.randn(), torch.randn(()).item())

    def switch(self, pl_module, is_on):
        for part in pl_module.net:
            if isinstance(part, Jitter):
                part.is_on = is_on


def run(folder, smp, when, kinds, noisy=False):
    module, drawing = module_of(noisy), Draws(when, kinds, noisy)
    trainer = toy_trainer(folder, smp=smp, callbacks=[drawing])
    trainer.fit(module, toy_loader(), toy_loader(shuffle=False))
    return drawing.found, module.seen


def assert_close(found, expected):
    assert list(found) == list(expected)
    for kind, numbers in expected.items():
        assert len(found[kind]) == len(numbers) > 0
        for mine, plain in zip(found[kind], numbers, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
def test_draws_in_a_hook_are_those_of_one_process(layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    with quiet():
        expected, order = run(tmp_path / "one", None, "on_train_epoch_end", KINDS)
    assert order[:6] != order[6:12]  # it is shuffled from where the hook has left the generator
    for found, seen in on_ranks(run, ranks, tmp_path / "smp", smp, "on_train_epoch_end", KINDS):
        assert_close(found, expected)
        if "dp" not in layout:  # replicas read samples of their own
            assert seen == order


@pytest.mark.dear
@pytest.mark.parametrize("when", ["on_train_epoch_end", "on_validation_epoch_end"])
@pytest.mark.parametrize("layout", ["pp2", "pp3", "pp2 sdp2"])
def test_units_that_draw_in_a_hook_go_on_from_each_other(layout, when, tmp_path):
    ranks, smp = LAYOUTS[layout]
    with quiet():
        expected, _ = run(tmp_path / "one", None, when, [samples], noisy=True)
    for found, _ in on_ranks(run, ranks, tmp_path / "smp", smp, when, [samples], noisy=True):
        assert_close(found, expected)
