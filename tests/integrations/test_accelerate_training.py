"""Training loops with Accelerate, under any layout: the weights of the plain loop in one process."""

import torch
from accelerate_checks import (
    MICROBATCHES,
    accelerated_loop,
    adamw,
    assert_same,
    batches,
    fresh_accelerator,
    on_ranks,
    plain_loop,
    toy,
    whole_state,
)


def train(smp, kind):
    accelerator = fresh_accelerator(smp)
    model = toy(kind)
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = accelerated_loop(accelerator, model, optimizer, batches())
    return whole_state(accelerator), losses


def trained_plainly(kind):
    model = toy(kind)
    losses = plain_loop(model, adamw(model), batches())
    return model.state_dict(), losses


def test_a_loss_in_the_model_gives_identical_weights():
    expected, losses = trained_plainly("dict")
    found = on_ranks(train, 2, {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}, "dict")
    assert_same(found[0][0], expected)
    for _, seen in found:
        assert torch.equal(torch.stack(seen), torch.stack(losses))
