"""Scripts with SageMaker's functions against one plain process: losses and weights under each layout."""

import pytest
import torch
from smp_checks import (
    LAYOUTS,
    MICROBATCHES,
    assert_same,
    batches,
    begin,
    mine,
    net,
    on_ranks,
    plain,
    sgd,
    train_step,
)

import smp_strategy.smp as smp

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# Layouts, with the plain loop that adds in the same order, and the tolerance where it does not.
EXACT = {
    "single": {},
    "pp2": {"parts": MICROBATCHES},
    "sdp2": {"replicas": 2},
    "replicas2": {"replicas": 2},
    "pp2 x replicas2": {"parts": 2, "replicas": 2},
}


def trained(parameters):
    model, optimizer = begin(parameters)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        logits, loss = train_step(model, *mine(batch))
        assert torch.equal(logits.concat(), torch.cat(logits.outputs))
        losses.append(loss.reduce_mean())
        optimizer.step()
    state = model.state_dict()
    mean = torch.stack(losses)
    gathered = smp.allgather(mean, smp.RDP_GROUP)
    return sum(gathered[1:], gathered[0]) / len(gathered), state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_function_trains_as_one_plain_process(layout):
    ranks, parameters = LAYOUTS[layout]
    losses, weights = plain(**EXACT.get(layout, {}))
    tolerance = {} if layout in EXACT else CLOSE
    for found in on_ranks(trained, ranks, parameters):
        torch.testing.assert_close(found[0], losses, **(tolerance or {"rtol": 1e-6, "atol": 1e-7}))
        assert_same(found[1], weights, **tolerance)


def made_in(dtype):
    """A float32 model with the values that it gets under another default dtype."""
    torch.set_default_dtype(dtype)
    model = net()
    torch.set_default_dtype(torch.float32)
    return model.float()


def in_half(parameters, dtype, folder):
    """Trains four steps and saves after two; a second run goes on from there."""
    rules = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10}}
    runs = []
    for begun in (0, 2):
        smp.init(parameters)
        with smp.model_creation(dtype=dtype):
            model = net()
        model = smp.DistributedModel(model)
        optimizer = smp.DistributedOptimizer(sgd(model.parameters()), **rules)
        if begun:
            assert smp.resume_from_checkpoint(folder) == {"step": 2}
        losses = []
        for number, batch in enumerate(batches()[begun:], begun):
            optimizer.zero_grad()
            losses.append(train_step(model, *mine(batch))[1].reduce_mean())
            optimizer.step()
            if number == 1:
                smp.save_checkpoint(folder, "two", model=model, optimizer=optimizer, user_content={"step": 2})
        runs.append((losses, model.state_dict()))
        gathered = smp.allgather(torch.stack(losses), smp.RDP_GROUP)
        smp.shutdown()
        mean = sum(gathered[1:], gathered[0]) / len(gathered)
        runs[-1] = (mean, runs[-1][1])
    return runs


@pytest.mark.parametrize(
    ("layout", "option"),
    [
        ("pp2", "fp16"),
        ("pp2", "bf16"),
        ("tp2", "bf16"),
        ("sdp2", "bf16"),
        ("sdp2", "fp16"),
        ("pp2 x replicas2", "fp16"),
    ],
)
def test_half_precision_trains_as_one_process_and_goes_on_to_the_bit(tmp_path, layout, option):
    ranks, parameters = LAYOUTS[layout]
    dtype = torch.float16 if option == "fp16" else torch.bfloat16
    rtol, far = (2e-3, 2e-3) if option == "fp16" else (1e-2, 1e-2)
    microbatches = {"microbatches": parameters.get("microbatches", 1)}
    alone = on_ranks(in_half, 1, {**microbatches, option: True}, dtype, tmp_path / "alone")[0][0]
    in_float32 = plain(made_in(dtype), **EXACT.get(layout, {}), make=sgd)
    for whole, rest in on_ranks(in_half, ranks, {**parameters, option: True}, dtype, tmp_path / "ranks"):
        for (losses, weights), tolerance in ((alone, rtol), (in_float32, far)):
            torch.testing.assert_close(whole[0].float(), losses.float(), rtol=tolerance, atol=1e-3)
            assert_same(whole[1], weights, rtol=tolerance, atol=tolerance)
        assert torch.equal(rest[0], whole[0][2:])
        assert_same(rest[1], whole[1])
