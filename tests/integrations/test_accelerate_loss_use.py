"""Losses that scripts compute from results of the model beside its own loss: the first backward tells which it is."""

import pytest
import torch
from accelerate_checks import (
    CLASSES,
    FEATURES,
    WIDTH,
    Result,
    assert_same,
    batches,
    fresh_accelerator,
    mine,
    on_ranks,
    whole_state,
)
from torch import nn

from smp_strategy.errors import UnsupportedError

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 4}
LAYOUTS = {
    "pp2": (2, PP2),
    "pp2, one microbatch": (2, {"pipeline_parallel_degree": 2, "microbatches": 1}),
    "sdp2": (2, {"sharded_data_parallel_degree": 2}),
    "tp2": (2, {"tensor_parallel_degree": 2, "tensor_parallel": {"blocks.*.0": "column"}}),
    "pp2 x dp2": (4, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "pp2 x sdp2": (4, {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2, "microbatches": 2}),
}


class Counting(nn.Module):
    """Its loss and its logits depend on how often it was called, and on a queue of earlier features."""

    def __init__(self, norm: bool = False, reads: bool = False, drops: float = 0.0) -> None:
        super().__init__()
        self.inlet = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(drops)) for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.outlet = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("shift", torch.zeros(()))
        self.calls = 0
        self.reads = reads

    def forward(self, inputs, targets=None):
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.reads and hidden.sum() > 1e9:
            hidden = hidden * 2
        logits = self.outlet(self.norm(hidden)) + self.shift
        loss = None if targets is None else nn.functional.cross_entropy(logits, targets)
        return Result(loss, logits)

    def count(self):
        """Change what the next calls return."""
        self.calls += 1
        self.shift += 0.1


def model_of(**options):
    torch.manual_seed(0)
    return Counting(**options)


def on_logits(result, batch):
    weights = torch.linspace(0.5, 1.5, 4)
    losses = nn.functional.cross_entropy(result.logits, batch["targets"], reduction="none")
    return (losses * weights[torch.arange(len(losses)) % 4]).mean()


def distilled(result, batch):
    """The model's loss and another one, of which each needs a gradient."""
    return 0.5 * result.loss + result.logits.square().mean()


def in_place(result, batch):
    """Logits that the script changes after the call."""
    logits = result.logits.div_(2.0)
    return nn.functional.cross_entropy(logits, batch["targets"])


LOSSES = {each.__name__: each for each in (on_logits, distilled, in_place)}


def train(smp, loss_name, options=None, window=1):
    accelerator = fresh_accelerator(smp, gradient_accumulation_steps=window)
    model = model_of(**(options or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for batch in batches(4):
        with accelerator.accumulate(model):
            own = batch if smp is None else mine(accelerator, batch)
            loss = LOSSES[loss_name](model(**own), own)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    counted = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return losses, counted


def alone(*args):
    return on_ranks(train, 1, None, *args)[0]


def assert_alike(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert_same(found[1], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_any_function_of_the_results_trains(loss, layout):
    ranks, smp = LAYOUTS[layout]
    expected = alone(loss)
    for found in on_ranks(train, ranks, smp, loss):
        assert_alike(found, expected)


@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_windows_of_several_batches(layout):
    ranks, smp = LAYOUTS[layout]
    expected = alone("on_logits", None, 2)
    for found in on_ranks(train, ranks, smp, "on_logits", None, 2):
        assert_alike(found, expected)


def test_a_model_that_reads_values():
    expected = alone("on_logits", {"reads": True})
    for found in on_ranks(train, 2, PP2, "on_logits", {"reads": True}):
        assert_alike(found, expected)


def trained_beside(smp, option, names, drops=0.5):
    """Losses and weights with random numbers and running means; `option` is that of `loss_in_model`."""
    accelerator = fresh_accelerator({**smp, "loss_in_model": option})
    model = model_of(norm=True, drops=drops)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for name, batch in zip(names, batches(len(names)), strict=True):
        loss = LOSSES[name](model(**batch), batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        model.count()
        losses.append(loss.detach())
    return losses, whole_state(accelerator), model.calls


@pytest.mark.parametrize("layout", ["pp2", "sdp2"])
def test_the_first_call_leaves_what_one_call_leaves(layout):
    ranks, smp = LAYOUTS[layout]
    expected = on_ranks(trained_beside, ranks, smp, False, ["on_logits"] * 3)
    found = on_ranks(trained_beside, ranks, smp, "auto", ["on_logits"] * 3)
    for (losses, weights, calls), (own_losses, own_weights, own_calls) in zip(found, expected, strict=True):
        torch.testing.assert_close(losses, own_losses, rtol=0, atol=0)
        assert_same(weights, own_weights)
        assert calls == own_calls == 3


def two_calls_before_backward(smp):
    accelerator = fresh_accelerator(smp)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for number in range(0, 4, 2):
        first, second = batches(4)[number : number + 2]
        one, other = model(**first), model(**second)
        loss = on_logits(one, first) + 0.3 * other.loss + (other.logits - one.logits).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach()], accelerator.get_state_dict(model)


def test_two_calls_before_a_backward():
    expected = on_ranks(two_calls_before_backward, 1, None)[0]
    for found in on_ranks(two_calls_before_backward, 2, PP2):
        assert_alike(found, expected)


def retained(smp):
    accelerator = fresh_accelerator(smp)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = batches()[0]
    result = model(**batch)
    accelerator.backward(result.logits.square().mean(), retain_graph=True)
    accelerator.backward(result.loss)
    optimizer.step()
    return [], accelerator.get_state_dict(model)


def test_a_graph_that_is_kept_for_a_second_backward():
    expected = on_ranks(retained, 1, None)[0]
    for found in on_ranks(retained, 2, PP2):
        assert_alike(found, expected)


def with_input(smp):
    accelerator = fresh_accelerator(smp)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for batch in batches(2):
        inputs = batch["inputs"].clone().requires_grad_()
        accelerator.backward(on_logits(model(inputs, targets=batch["targets"]), batch))
        found.append(inputs.grad)
        optimizer.step()
        optimizer.zero_grad()
    return found, accelerator.get_state_dict(model)


def test_a_differentiable_input():
    expected = on_ranks(with_input, 1, None)[0]
    for found in on_ranks(with_input, 2, PP2):
        assert_alike(found, expected)


def decided_by_the_loss():
    accelerator = fresh_accelerator(PP2)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    first, second = batches(2)
    accelerator.backward(model(**first).loss)
    optimizer.step()
    with pytest.raises(UnsupportedError, match="loss_in_model=False"):
        accelerator.backward(on_logits(model(**second), second))


def test_other_results_after_the_loss_has_been_trained_on_are_refused():
    on_ranks(decided_by_the_loss, 2)


class FusedHead(torch.autograd.Function):
    """Log-probabilities of targets from a weight of a unit, as libraries fuse the last layer with the loss."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        logits = hidden @ torch.cat([weight[:2], weight[2:]]).T
        found = logits.log_softmax(-1)
        ctx.save_for_backward(hidden, weight, found, targets)
        return found.gather(-1, targets[:, None])[:, 0]

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, found, targets = ctx.saved_tensors
        of_logits = (nn.functional.one_hot(targets, CLASSES) - found.exp()) * grad[:, None]
        return of_logits @ weight[:], of_logits.T @ hidden, None


class Fused(Counting):
    """Its loss comes from results of that function, which it returns as well."""

    def forward(self, inputs, targets):
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        found = FusedHead.apply(hidden, self.outlet.weight, targets)
        return {"loss": -found.mean(), "log_probs": found}


def fused(smp):
    accelerator = fresh_accelerator(smp)
    torch.manual_seed(0)
    model = Fused()
    model.outlet.bias = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for batch in batches(3):
        result = model(**(batch if smp is None else mine(accelerator, batch)))
        loss = -(result["log_probs"] * (1 + result["log_probs"].exp().detach())).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    return losses, accelerator.get_state_dict(model)


@pytest.mark.parametrize("layout", ["pp2", "sdp2", "tp2", "pp2 x sdp2"])
def test_a_head_that_is_fused_with_the_loss(layout):
    ranks, smp = LAYOUTS[layout]
    expected = on_ranks(fused, 1, None)[0]
    for found in on_ranks(fused, ranks, smp):
        assert_alike(found, expected)


class Drawing(Counting):
    """Returns something else at each call, whatever its state."""

    def forward(self, inputs, targets=None):
        result = super().forward(inputs, targets)
        return Result(result.loss, result.logits + OUTSIDE())


class Outside:
    """A counter that no snapshot knows."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return float(self.count)


OUTSIDE = Outside()


def not_repeatable():
    accelerator = fresh_accelerator({"pipeline_parallel_degree": 2, "microbatches": 1})
    torch.manual_seed(0)
    model = Drawing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = batches()[0]
    with pytest.raises(UnsupportedError, match="returned something else than before.*loss_in_model=False"):
        accelerator.backward(on_logits(model(**batch), batch))


def test_a_model_that_returns_something_else_the_second_time_is_refused():
    on_ranks(not_repeatable, 2)
