"""Where gradients go in scripts whose loss is none of one call of the model, against one process."""

import torch
from accelerate_checks import (
    MICROBATCHES,
    adamw,
    assert_same,
    batches,
    fresh_accelerator,
    on_ranks,
    toy,
    whole_state,
)
from torch import nn

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
