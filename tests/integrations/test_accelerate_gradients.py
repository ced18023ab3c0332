"""Where gradients go in scripts whose loss is none of one call of the model, against one process."""

import pytest
import torch
from accelerate import Accelerator
from accelerate_checks import (
    BATCH,
    FEATURES,
    MICROBATCHES,
    adamw,
    assert_same,
    batches,
    fresh_accelerator,
    mine,
    on_ranks,
    toy,
    whole_state,
)
from torch import nn

from smp_strategy import UnsupportedError

PP2 = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}
TP2 = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "tensor_parallel": {"blocks.*.0": "column"}}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def contrastive(model, batch, gather, reduce):
    """Of two views of each sample, and the views of all processes."""
    views = [model(batch["inputs"] * scale)["logits"] for scale in (1.0, 1.5)]
    here, there = gather(views)
    loss = nn.functional.cross_entropy(here @ there.T, torch.arange(len(here)))
    return reduce(loss, "mean")


def gathered(smp):
    accelerator = fresh_accelerator(smp)
    model = toy()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for batch in batches():
        accelerator.backward(contrastive(model, batch, accelerator.gather, accelerator.reduce))
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(accelerator)


def test_with_one_data_rank_what_is_gathered_has_a_history():
    model = toy()
    optimizer = adamw(model)
    for batch in batches():
        contrastive(model, batch, lambda views: views, lambda loss, _: loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    for smp, ranks in [(PP2, 2), (TP2, 2), (PP2 | {"pipeline_parallel_degree": 1}, 1)]:
        assert_same(on_ranks(gathered, ranks, smp)[0], model.state_dict(), **CLOSE)


class Generator(nn.Module):
    """Makes what the other model takes for data."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4)])

    def forward(self, noise):
        return self.layers(noise)


def generator():
    torch.manual_seed(1)
    return Generator()


def verdict(judge, samples, targets, *, inside):
    if inside:
        return judge(samples, targets)["loss"]
    return nn.functional.cross_entropy(judge(samples)["logits"], targets)


def adversaries(maker, judge, optimizers, batch, backward, *, inside, freezes=False):
    """A step of the one that judges, and one of the one that makes."""
    optimizer_of_maker, optimizer_of_judge = optimizers
    noise = batch["inputs"].flip(-1)
    fake, wrong = maker(noise), torch.zeros_like(batch["targets"])
    true = verdict(judge, batch["inputs"], batch["targets"], inside=inside)
    backward(true + verdict(judge, fake.detach(), wrong, inside=inside))
    optimizer_of_judge.step()
    optimizer_of_judge.zero_grad()
    judge.requires_grad_(not freezes)
    backward(verdict(judge, fake * 1.0, batch["targets"], inside=inside))
    judge.requires_grad_(True)
    optimizer_of_maker.step()
    optimizer_of_maker.zero_grad()
    optimizer_of_judge.zero_grad()


def adversarial(smp, inside, freezes, both):
    accelerator = fresh_accelerator(smp)
    judge, maker = toy(), generator()
    judge, optimizer = accelerator.prepare(judge, adamw(judge))
    other = adamw(maker)
    if both:
        maker, other = Accelerator().prepare(maker, other)
    for batch in batches():
        batch = mine(accelerator, batch)
        adversaries(maker, judge, (other, optimizer), batch, accelerator.backward, inside=inside, freezes=freezes)
    return maker.state_dict(), whole_state(accelerator)


@pytest.mark.parametrize(
    ("smp", "ranks", "freezes", "both"),
    [
        (PP2, 2, False, False),
        (PP2, 2, True, True),
        ({"pipeline_parallel_degree": 1, "microbatches": 2}, 1, True, False),
        (TP2, 2, False, False),
        ({"sharded_data_parallel_degree": 2, "microbatches": 2}, 2, False, True),
        ({"pipeline_parallel_degree": 2, "pipeline": "zb-h1", "microbatches": 4}, 2, False, False),
    ],
    ids=["pp2", "pp2 both", "pp1", "tp2", "sdp2 both", "zb"],
)
def test_gradients_flow_through_the_model_to_its_input(smp, ranks, freezes, both):
    for inside in (True, False):
        judge, maker = toy(), generator()
        optimizers = adamw(maker), adamw(judge)
        for batch in batches():
            adversaries(maker, judge, optimizers, batch, torch.Tensor.backward, inside=inside, freezes=freezes)
        made, judged = on_ranks(adversarial, ranks, smp, inside, freezes, both)[0]
        assert_same(judged, judge.state_dict(), **CLOSE)
        assert_same(made, maker.state_dict(), **CLOSE)


def asked_for_inputs_alone():
    accelerator = fresh_accelerator(PP2)
    model = accelerator.prepare(toy())
    batch = batches()[0]
    inputs = batch["inputs"].requires_grad_()
    inside = torch.autograd.grad(3 * verdict(model, inputs, batch["targets"], inside=True), inputs)[0]
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(UnsupportedError, match=r"`torch\.autograd\.grad`"):
        torch.autograd.grad(verdict(model, inputs, batch["targets"], inside=False), inputs)
    logits = model(inputs)["logits"]
    logits.sum().backward(retain_graph=True)
    logits.square().sum().backward()
    return inside, inputs.grad


def test_gradients_of_inputs_alone():
    model, batch = toy(), batches()[0]
    inputs = batch["inputs"].requires_grad_()
    inside = torch.autograd.grad(3 * verdict(model, inputs, batch["targets"], inside=True), inputs)[0]
    logits = model(inputs)["logits"]
    (logits.sum() + logits.square().sum()).backward()
    for found in on_ranks(asked_for_inputs_alone, 2):
        torch.testing.assert_close(found[0], inside, **CLOSE)
        torch.testing.assert_close(found[1], inputs.grad, **CLOSE)


class Several(type(toy())):
    """Has methods that stand for calls of it."""

    computed = 0

    def encode(self, inputs):
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.outlet(hidden)

    def compute_loss(self, batch, *, scale=1.0):
        self.computed += 1
        scale = scale * (0.5 + 0.0 * torch.rand(()))
        return scale * nn.functional.cross_entropy(self.encode(batch["inputs"]), batch["targets"])

    def twice(self, batch):
        return self.compute_loss(batch) + self(**batch)["loss"]

    def accuracy(self, batch):
        with torch.no_grad():
            return (self.encode(batch["inputs"]).argmax(-1) == batch["targets"]).float().mean().item()

    def describe(self):
        return f"{type(self).__name__} with {len(self.blocks)} blocks"


def several():
    torch.manual_seed(0)
    return Several()


WAYS = {
    "loss": lambda model, batch: model.compute_loss(batch, scale=2.0),
    "result": lambda model, batch: nn.functional.cross_entropy(model.encode(batch["inputs"]), batch["targets"]),
    "both": lambda model, batch: model(**batch)["loss"] + model.compute_loss(batch),
    "calls itself": lambda model, batch: model.twice(batch),
}


def by_methods(smp, way):
    accelerator = fresh_accelerator(smp)
    model = several()
    model, optimizer = accelerator.prepare(model, adamw(model))
    data, accuracies = batches(), []
    assert model.describe() == "Several with 4 blocks"
    torch.manual_seed(7)
    for batch in data:
        accelerator.backward(WAYS[way](model, mine(accelerator, batch)))
        optimizer.step()
        optimizer.zero_grad()
        accuracies.append(model.accuracy(batch))
    return whole_state(accelerator), accuracies


@pytest.mark.parametrize(
    ("smp", "ranks"),
    [(PP2, 2), ({"sharded_data_parallel_degree": 2, "microbatches": 2}, 2), ({"pipeline_parallel_degree": 1}, 2)],
    ids=["pp2", "sdp2", "dp2"],
)
@pytest.mark.parametrize("way", WAYS)
def test_methods_of_the_model_are_steps(way, smp, ranks):
    model, accuracies = several(), []
    optimizer = adamw(model)
    for batch in batches():
        WAYS[way](model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        accuracies.append(model.accuracy(batch))
    found = on_ranks(by_methods, ranks, smp, way)
    assert_same(found[0][0], model.state_dict(), **CLOSE)
    assert [each for _, each in found] == [accuracies] * ranks


def left_as_it_was():
    """A method that turns out to be a step has counted and drawn nothing before that."""
    accelerator = fresh_accelerator(PP2)
    model = accelerator.prepare(several())
    torch.manual_seed(7)
    with torch.no_grad():
        model.compute_loss(batches()[0])
    return model.computed


def parts_alone(smp, way):
    accelerator = fresh_accelerator(smp)
    model = several()
    model, optimizer = accelerator.prepare(model, adamw(model))
    batch = batches()[0]
    if way == "later":
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
    with pytest.raises(UnsupportedError, match=r"`inlet` .* outside of the prepared model"):
        model.inlet(batch["inputs"]).sum().backward()


def test_gradients_of_parts_alone_are_refused():
    assert on_ranks(left_as_it_was, 2) == [1, 1]
    for way in ("at once", "later"):
        on_ranks(parts_alone, 2, PP2, way)
        on_ranks(parts_alone, 2, {"pipeline_parallel_degree": 1}, way)


def refused_inputs(smp):
    accelerator = fresh_accelerator(smp)
    model = accelerator.prepare(toy())
    with pytest.raises(UnsupportedError, match="needs a gradient"):
        model(torch.zeros(BATCH, FEATURES).requires_grad_())


def test_inputs_that_could_not_get_gradients_are_refused():
    on_ranks(refused_inputs, 2, TP2 | {"prescaled_batch": False})
