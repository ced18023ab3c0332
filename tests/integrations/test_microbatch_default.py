"""Microbatches of a step where a door is told the degree alone: as many as samples, at most 4 per stage."""

import accelerate_checks
import hf_checks
import lightning_toy
import pytest

from smp_strategy.engine.plan_cache import PlanCache

PP2 = {"pipeline_parallel_degree": 2}


def counted(train, folder, batch_size):
    """Microbatches of each training step."""
    counts, order_of = [], PlanCache.order_of

    def noted(plans, kind, num_microbatches):
        if kind == "train":
            counts.append(num_microbatches)
        return order_of(plans, kind, num_microbatches)

    PlanCache.order_of = noted  # in this process only
    train(folder, batch_size)
    return counts


def in_lightning(folder, batch_size):
    trainer = lightning_toy.toy_trainer(folder, smp=PP2, max_epochs=1, limit_train_batches=2)
    trainer.fit(lightning_toy.toy_module(), lightning_toy.toy_loader(batch_size=batch_size))


def in_accelerate(folder, batch_size):
    accelerator = accelerate_checks.fresh_accelerator(PP2)
    model = accelerate_checks.toy()
    model, optimizer = accelerator.prepare(model, accelerate_checks.adamw(model))
    accelerate_checks.accelerated_loop(accelerator, model, optimizer, accelerate_checks.batches(2, batch_size))


def in_trainer(folder, batch_size):
    hf_checks.text_trainer(folder, PP2, per_device_train_batch_size=batch_size, max_steps=2).train()


@pytest.mark.parametrize("door", [in_lightning, in_accelerate, in_trainer])
@pytest.mark.parametrize(("batch_size", "expected"), [(12, 8), (3, 3)])
def test_a_door_that_is_told_the_degree_alone_fills_the_stages(tmp_path, door, batch_size, expected):
    for counts in lightning_toy.on_ranks(counted, 2, door, tmp_path, batch_size):
        assert counts == [expected, expected]
