"""Half precision under Accelerate: its own ``mixed_precision``, and the options of the plugin, in any layout.

That one rank with ``fp16`` or ``bf16`` has the weights of a process that casts by hand is checked in
`tests/ranks/test_half_precision.py`; here every layout has those of replicas that are whole.
"""

import pytest
import torch
from accelerate_checks import (
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

from smp_strategy import UnsupportedError
from smp_strategy.engine.updates.grad_scaler import GradScaler

LAYOUTS = {
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "pp2 x sdp2": (4, {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
    "zero1": (2, {"shard_optimizer_state": True}),
}
# The factor overflows first: two steps are skipped.
SCALED = {"fp16": True, "init_scale": 2.0**20, "scale_window": 2}


def train(smp, *, loss_of=loss_inside, window=1, clip=0.5, **options):
    accelerator = fresh_accelerator(smp, gradient_accumulation_steps=window, **options)
    model = toy()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skipped, norms = [], []
    for batch in batches():
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, mine(accelerator, batch)))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    scale = None if accelerator.scaler is None else accelerator.scaler.get_scale()
    return whole_state(accelerator), skipped, scale, scheduler.scheduler._step_count, torch.stack(norms)


@pytest.mark.parametrize("loss_of", [loss_inside, loss_outside])
def test_mixed_precision_of_accelerate(loss_of):
    def reference(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(**batch) if loss_of is loss_inside else model(batch["inputs"])
        if loss_of is loss_inside:
            return outputs["loss"].float()
        return torch.nn.functional.cross_entropy(outputs["logits"].float(), batch["targets"])

    model = toy()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=1.0)
    plain_loop(model, optimizer, batches(), loss_of=reference, clip=0.5, schedule=scheduler.step)
    smp = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}
    found = on_ranks(in_bf16, 2, smp, loss_of)[0]
    assert_same(found, model.state_dict())
    full = toy()
    plain_loop(full, adamw(full), batches(), loss_of=loss_of, clip=0.5)
    assert any(not torch.equal(found[name], value) for name, value in full.state_dict().items())


def in_bf16(smp, loss_of):
    return train(smp, loss_of=loss_of, mixed_precision="bf16")[0]


def of_options(smp):
    """With each option, the loss in the model and outside of it, with accumulation."""
    cases = {
        "bf16": ({"bf16": True}, {}),
        "bf16, loss outside": ({"bf16": True}, {"loss_of": loss_outside}),
        "fp16": (SCALED, {}),
        "fp16, accumulation": (SCALED, {"window": 2}),
        "fp16, loss outside": (SCALED, {"loss_of": loss_outside}),
    }
    return {name: train({**smp, **options}, **more) for name, (options, more) in cases.items()}


@pytest.fixture(scope="module")
def alone():
    """By replicas: each computes larger losses, and overflows earlier, the more there are."""
    whole = {"pipeline_parallel_degree": 1}
    return {
        replicas: on_ranks(of_options, replicas, {**whole, "microbatches": MICROBATCHES // replicas})[0]
        for replicas in (1, 2)
    }


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
def test_options_of_precision_give_the_weights_of_whole_replicas(layout, alone):
    ranks, smp = LAYOUTS[layout]
    replicas = ranks // smp.get("pipeline_parallel_degree", 1)
    found = on_ranks(of_options, ranks, {**smp, "microbatches": MICROBATCHES // replicas})
    for name, (weights, skipped, scale, _, norms) in alone[replicas].items():
        tolerance = {} if layout == "pp2" else {"rtol": 1e-4, "atol": 1e-5}
        assert_same(found[0][name][0], weights, **tolerance)
        for rank in found:
            assert rank[name][1:3] == (skipped, scale), name
            torch.testing.assert_close(
                rank[name][4], norms, rtol=1e-4, atol=1e-5, equal_nan=True, msg=f"{name}: {{}}".format
            )
    assert any(alone[replicas]["fp16"][1])
    assert not all(alone[replicas]["fp16"][1])


def test_a_scheduler_passes_over_skipped_steps(alone):
    _, skipped, _, steps, _ = alone[1]["fp16"]
    assert steps == 1 + len(skipped) - sum(skipped)


def other_scalers():
    accelerator = fresh_accelerator({"microbatches": 2})
    assert accelerator.scaler is None
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)  # as Accelerate does for fp16
    assert isinstance(accelerator.scaler, GradScaler)
    assert (accelerator.scaler.get_scale(), accelerator.scaler.rules.window) == (8.0, 3)
    accelerator = fresh_accelerator({"microbatches": 2, "fp16": True})
    model = toy()
    bare = adamw(model)
    model = accelerator.prepare(model)
    accelerator.backward(model(**batches()[0])["loss"])
    with pytest.raises(UnsupportedError, match="without being prepared"):
        bare.step()


def test_scalers_of_others():
    on_ranks(other_scalers, 1)
