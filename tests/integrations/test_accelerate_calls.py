"""Calls of the model that are none of a plain training step: how else do scripts use what they have prepared?

All in one pipeline of two stages, against one process.
"""

import copy
from collections import UserDict

import pytest
import torch
from accelerate_checks import (
    BATCH,
    MICROBATCHES,
    adamw,
    assert_same,
    batches,
    fresh_accelerator,
    loss_inside,
    loss_outside,
    mine,
    on_ranks,
    plain_loop,
    toy,
    whole_state,
)
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from smp_strategy import SMPError, UnsupportedError

PP2 = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}


def prepared(smp=PP2, kind="dict", **options):
    accelerator = fresh_accelerator(smp, **options)
    model = toy(kind)
    model, optimizer = accelerator.prepare(model, adamw(model))
    return accelerator, model, optimizer


def step(accelerator, optimizer, loss):
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def by_hand(loss_of):
    """Three batches for each step, counted by the script; weights on losses; zeroed before backward."""
    accelerator, model, optimizer = prepared()
    for number, batch in enumerate(batches()):
        loss = loss_of(model, batch) / 4
        if number % 3 == 0:
            optimizer.zero_grad()
        accelerator.backward(0.5 * loss)
        if number % 3 == 2:
            optimizer.step()
    return whole_state(accelerator)


@pytest.mark.parametrize("loss_of", [loss_inside, loss_outside])
def test_accumulation_by_hand_and_weights_on_losses(loss_of):
    model = toy()
    optimizer = adamw(model)
    for number, batch in enumerate(batches()):
        if number % 3 == 0:
            optimizer.zero_grad()
        for part in range(MICROBATCHES):
            size = BATCH // MICROBATCHES
            cut = {name: value[part * size : (part + 1) * size] for name, value in batch.items()}
            (loss_of(model, cut) / MICROBATCHES / 8).backward()
        if number % 3 == 2:
            optimizer.step()
    assert_same(on_ranks(by_hand, 2, loss_of)[0], model.state_dict(), rtol=1e-5, atol=1e-6)


def pairs(loss_of):
    """Two calls, or two losses, before one backward; evaluation in between."""
    accelerator, model, optimizer = prepared()
    data = batches()
    for first, second in zip(data[::2], data[1::2], strict=True):
        one = loss_of(model, first)
        model.eval()
        with torch.no_grad():
            seen = model(second["inputs"])["logits"]
        model.train()
        other = loss_of(model, second)
        step(accelerator, optimizer, one + 0.5 * other)
    return whole_state(accelerator), seen


@pytest.mark.parametrize("loss_of", [loss_inside, loss_outside])
def test_several_calls_before_one_backward(loss_of):
    found, seen = on_ranks(pairs, 2, loss_of)[0]
    model, data = toy(), batches()
    optimizer = adamw(model)
    for first, second in zip(data[::2], data[1::2], strict=True):
        with torch.no_grad():
            expected = model(second["inputs"])["logits"]
        (loss_of(model, first) + 0.5 * loss_of(model, second)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(found, model.state_dict(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)


def evaluated():
    accelerator, model, optimizer = prepared()
    batch = batches()[0]
    found = {}
    with torch.no_grad():
        found["first"] = model(**batch)
    model.eval()
    with torch.inference_mode():
        found["inference"] = model(batch["inputs"], targets=batch["targets"])["logits"].clone()
    found["with gradients"] = model(**batch)
    assert found["with gradients"]["logits"].requires_grad
    model.train()
    outputs = model(**batch)
    found["training"] = {name: value.detach() for name, value in outputs.items()}
    assert outputs["logits"].requires_grad
    return {name: value for name, value in found.items() if name != "with gradients"}


def test_results_are_real_on_every_rank():
    model, batch = toy(), batches()[0]
    with torch.no_grad():
        expected = model(**batch)
    for found in on_ranks(evaluated, 2):
        for name in ("first", "training"):
            assert list(found[name]) == list(expected)
            for key, value in expected.items():
                torch.testing.assert_close(found[name][key], value, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found["inference"], expected["logits"], rtol=1e-6, atol=1e-6)


def refused():
    _, model, _ = prepared({**PP2, "loss_in_model": True})
    batch = batches()[0]
    outputs = model(**batch)
    with pytest.raises(UnsupportedError, match="loss_in_model=False"):
        nn.functional.cross_entropy(outputs["logits"], batch["targets"]).backward()
    loss = model(**batch)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(SMPError, match="a second time"):
        loss.backward()


def test_gradients_of_other_results_are_refused_if_the_loss_is_insisted_on():
    on_ranks(refused, 2)


def both_losses():
    accelerator, model, optimizer = prepared({**PP2, "loss_in_model": False})
    batch = batches()[0]
    outputs = model(**batch)
    extra = outputs["logits"].square().mean()
    accelerator.backward(extra, retain_graph=True)
    accelerator.backward(outputs["loss"])
    optimizer.step()
    return whole_state(accelerator)


def test_a_loss_in_the_model_and_one_outside():
    model, batch = toy(), batches()[0]
    optimizer = adamw(model)
    outputs = model(**batch)
    (outputs["loss"] + outputs["logits"].square().mean()).backward()
    optimizer.step()
    assert_same(on_ranks(both_losses, 2)[0], model.state_dict(), rtol=1e-5, atol=1e-6)


def only_losses():
    accelerator, model, optimizer = prepared({**PP2, "training_outputs": "loss"})
    for batch in batches():
        outputs = model(**batch)
        with pytest.raises(UnsupportedError, match="training_outputs=all"):
            outputs["logits"].argmax(-1)
        step(accelerator, optimizer, outputs["loss"])
    return whole_state(accelerator)


def test_only_the_loss_is_sent_around():
    model = toy()
    plain_loop(model, adamw(model), batches())
    assert_same(on_ranks(only_losses, 2)[0], model.state_dict())


class Summed(nn.Module):
    """Its loss is a sum over samples."""

    def __init__(self):
        super().__init__()
        self.inner = toy()

    def forward(self, inputs, targets):
        logits = self.inner(inputs)["logits"]
        return {"loss": nn.functional.cross_entropy(logits, targets, reduction="sum"), "logits": logits}


SPLIT = {"inner.inlet": "column", "inner.blocks.*.0": "column", "inner.outlet": "row"}
SUMMING = {
    "stages": PP2,
    "replicas": {"microbatches": 2},
    "split layers": {"tensor_parallel_degree": 2, "tensor_parallel": SPLIT, "microbatches": 4},
    "split layers, own samples": {
        "tensor_parallel_degree": 2,
        "tensor_parallel": SPLIT,
        "microbatches": 4,
        "prescaled_batch": False,
    },
}


def summed(smp, loss_in_model):
    accelerator = fresh_accelerator({**smp, "loss_reduction": "sum", "loss_in_model": loss_in_model})
    model = Summed()
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = []
    for batch in batches():
        part = mine(accelerator, batch)
        with torch.no_grad():
            seen = model(**part)["loss"]
        loss = model(**part)["loss"]
        step(accelerator, optimizer, loss)
        torch.testing.assert_close(loss.detach(), seen)
        losses.append(loss.detach())
    return losses, whole_state(accelerator), accelerator.smp.num_data_ranks


@pytest.mark.parametrize("loss_in_model", ["auto", True, False])
@pytest.mark.parametrize("layout", SUMMING)
def test_losses_that_are_sums(layout, loss_in_model):
    (first, state, num_ranks), (second, *_) = on_ranks(summed, 2, SUMMING[layout], loss_in_model)
    model = Summed()
    optimizer = adamw(model)
    for batch, one, other in zip(batches(), first, second, strict=True):
        loss = model(**batch)["loss"] / num_ranks  # gradients are averaged over processes
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close((one + other) / 2, loss.detach(), rtol=1e-5, atol=1e-5)
    assert_same(state, model.state_dict(), rtol=1e-5, atol=1e-6)


def copied_and_hooked():
    accelerator, model, optimizer = prepared()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(len(output["logits"])))
    copied = copy.deepcopy(model)
    batch = batches()[0]
    step(accelerator, optimizer, model(**batch)["loss"])
    return seen, copied(**batch)["loss"].detach()


def test_hooks_see_whole_batches_and_copies_are_ordinary_modules():
    batch = batches()[0]
    for seen, loss in on_ranks(copied_and_hooked, 2):
        assert seen == [BATCH, BATCH]
        torch.testing.assert_close(loss, toy()(**batch)["loss"])


def language_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 32, "n_layer": 4, "n_head": 2, "n_embd": 16}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drop, bos_token_id=0, eos_token_id=0, pad_token_id=0))


TEXT = torch.arange(1, 25).reshape(4, 6)


def generate(model):
    """Greedily, and along beams, which are cut where tensors say."""
    ways = ({}, {"num_beams": 2, "use_cache": False})
    return [model.generate(TEXT, max_new_tokens=5, do_sample=False, **way) for way in ways]


def generated():
    accelerator = fresh_accelerator({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = language_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    outputs = model(input_ids=TEXT, labels=TEXT)
    assert isinstance(outputs, CausalLMOutputWithCrossAttentions)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        outputs.past_key_values.get_seq_length()
    step(accelerator, optimizer, outputs.loss)
    model.eval()
    found = generate(model)
    model.train()
    step(accelerator, optimizer, model(input_ids=TEXT, labels=TEXT).loss)
    return found, whole_state(accelerator)


@pytest.mark.dear
def test_text_is_generated_between_steps():
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for _ in range(2):
        for part in TEXT.split(2):
            (model(input_ids=part, labels=part).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(generate(model.eval()))
        model.train()
    for rank, (found, weights) in enumerate(on_ranks(generated, 2)):
        assert all(map(torch.equal, found, results[0]))
        if rank == 0:
            assert_same(weights, model.state_dict(), rtol=1e-5, atol=1e-6)  # tied weights: sums of two stages


PADDED = {"input_ids": TEXT, "attention_mask": torch.ones_like(TEXT)}
for row, padding in enumerate((4, 2, 0, 1)):
    PADDED["attention_mask"][row, :padding] = 0
LONGER = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


def distinct_model():
    """Its attention is far from uniform, so that a wrong mask shows."""
    model = language_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    return model.eval()


def generated_from_padded_text():
    accelerator = fresh_accelerator({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = distinct_model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [model.generate(**PADDED, **LONGER), model.generate(**PADDED, **LONGER, use_cache=True)]


def test_text_is_generated_from_padded_text():
    expected = distinct_model().generate(**PADDED, **LONGER)
    for found in on_ranks(generated_from_padded_text, 2):
        assert all(torch.equal(each, expected) for each in found)


def own_samples(loss_of, smp):
    accelerator, model, optimizer = prepared(smp)
    assert accelerator.num_processes == 2
    for batch in batches():
        part = mine(accelerator, batch)
        step(accelerator, optimizer, loss_of(model, part))
        with torch.no_grad():
            logits = model(**part)["logits"]
    uneven = {name: value[: 3 if accelerator.process_index else 1] for name, value in part.items()}
    with torch.no_grad():
        last = model(**uneven)["logits"]
    return whole_state(accelerator), logits, last


@pytest.mark.parametrize("loss_of", [loss_inside, loss_outside])
def test_ranks_that_split_layers_read_samples_of_their_own(loss_of):
    model = toy()
    plain_loop(model, adamw(model), batches(), loss_of=loss_of)
    with torch.no_grad():
        expected = model(batches()[-1]["inputs"])["logits"].split(BATCH // 2)
    split = {"inlet": "column", "blocks.*.0": "column", "outlet": "row"}
    smp = {"tensor_parallel_degree": 2, "prescaled_batch": False, "tensor_parallel": split, "microbatches": 4}
    found = on_ranks(own_samples, 2, loss_of, smp)
    assert_same(found[0][0], model.state_dict(), rtol=1e-5, atol=1e-6)
    for rank, (_, logits, last) in enumerate(found):
        torch.testing.assert_close(logits, expected[rank], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(last, expected[rank][: 3 if rank else 1], rtol=1e-5, atol=1e-5)


class ReturnsObjects(nn.Module):
    """Returns the mapping that it was called with and a distribution, as encoders of sentences and actors do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, features):
        x = features["x"]
        for layer in self.layers:
            x = layer(x).tanh()
        features["embedding"] = x
        features["pi"] = torch.distributions.Independent(torch.distributions.Normal(x, x.exp()), 1)
        return features


def loss_of_objects(out, x):
    return out["embedding"].square().mean() - out["pi"].log_prob(x * 0.1).mean()


def objects(smp):
    accelerator = fresh_accelerator(smp)
    torch.manual_seed(0)
    net = ReturnsObjects()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, 32).view(4, 8)
    out = model(UserDict(x=x))
    loss = loss_of_objects(out, x)
    step(accelerator, optimizer, loss)
    model.eval()
    with torch.no_grad():
        later = model(UserDict(x=x))
    kinds = (type(out).__name__, list(out), type(out["pi"]).__name__, out["pi"].batch_shape)
    return loss.item(), kinds, later["embedding"].tolist(), later["pi"].base_dist.scale.tolist()


@pytest.mark.parametrize("smp", [PP2, {"sharded_data_parallel_degree": 2}], ids=["pp2", "sdp2"])
def test_a_model_may_return_mappings_and_distributions(smp):
    torch.manual_seed(0)
    net = ReturnsObjects()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 32).view(4, 8)
    loss = loss_of_objects(net(UserDict(x=x)), x)
    loss.backward()
    optimizer.step()
    later = net(UserDict(x=x))
    for found, kinds, embedding, scale in on_ranks(objects, 2, smp):
        assert kinds == ("UserDict", ["x", "embedding", "pi"], "Independent", (4,))
        assert found == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(torch.tensor(embedding), later["embedding"].detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(scale), later["pi"].base_dist.scale.detach(), rtol=1e-5, atol=1e-6)
