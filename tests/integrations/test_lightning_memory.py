"""``trainer.strategy.memory_report()``: what each rank holds, in a callback on all ranks."""

import json
import weakref

import pytest
import torch
from lightning_toy import NEWER, OLDER, on_ranks, toy_loader, toy_module, toy_trainer

from smp_strategy import SMPError

SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}


def asks(folder, root, smp):
    module, found = toy_module(root), []

    def after_a_batch(outputs, batch, batch_idx):
        found.append(trainer.strategy.memory_report())
        found[-1].save(folder / "memory.json")

    module.on_train_batch_end = after_a_batch
    trainer = toy_trainer(folder, root, smp=smp, max_epochs=1)
    trainer.fit(module, toy_loader(), toy_loader(shuffle=False))
    assert found[-1].ranks == found[1].ranks, "nothing piles up"
    return found[-1], sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.parametrize(
    ("root", "ranks", "smp"),
    [
        (NEWER, 2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
        (OLDER, 2, {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}),
        (NEWER, 2, {"pipeline_parallel_degree": 1, **SHARDED}),
        (NEWER, 4, {"pipeline_parallel_degree": 2, "microbatches": 2, **SHARDED}),
    ],
)
def test_a_callback_learns_what_all_ranks_hold_and_that_is_what_was_predicted(root, ranks, smp, tmp_path):
    found = on_ranks(asks, ranks, tmp_path, root, smp)
    report, size = found[0]
    assert all(other.ranks == report.ranks for other, _ in found)
    assert [each.rank for each in report.ranks] == list(range(ranks))
    for each in report.ranks:
        held = report.predicted[each.stage]
        assert (each.parameters, each.gathered) == (held.parameter, held.gathered)
        assert each.optimizer <= held.optimizer
    copies = 2 if "shard_optimizer_state" in smp else 1
    total = sum(each.parameters for each in report.ranks)
    assert copies * size <= total <= 1.5 * copies * size  # padding of small layers
    assert json.loads((tmp_path / "memory.json").read_text())["total"] == sum(each.total for each in report.ranks)


def asks_in_a_step(folder, pp):
    module = toy_module()
    said = []

    def training_step(batch, batch_idx):
        with pytest.raises(SMPError, match="A memory report is asked for inside of a step"):
            trainer.strategy.memory_report()
        said.append(True)
        return module.loss(batch)

    def after_a_batch(outputs, batch, batch_idx):
        trainer.strategy.memory_report()

    module.training_step, module.on_train_batch_end = training_step, after_a_batch
    trainer = toy_trainer(folder, smp={"pipeline_parallel_degree": pp, "microbatches": 2}, max_epochs=1)
    trainer.fit(module, toy_loader())
    return bool(said)


@pytest.mark.parametrize("pp", [1, 2])
def test_in_a_step_it_is_refused(pp, tmp_path):
    assert on_ranks(asks_in_a_step, 2, tmp_path, pp) == [True, True]


def old_gradients_in_steps(folder, smp, accumulated, **hooks):
    """In each step: how many gradients of the last optimizer's step are in memory?"""
    old, alive = [], []

    def training_step(self, batch, batch_idx):
        alive.append(sum(gradient() is not None for gradient in old))
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)

        def note(*_):
            old[:] = [weakref.ref(each.grad) for each in self.parameters() if each.grad is not None]

        optimizer.register_step_post_hook(note)
        return optimizer

    module = toy_module(training_step=training_step, configure_optimizers=configure_optimizers, **hooks)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, accumulate_grad_batches=accumulated)
    trainer.fit(module, toy_loader())
    return alive


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    ("ranks", "smp"),
    [
        (2, {"pipeline_parallel_degree": 2, "microbatches": 1}),
        (2, {"pipeline_parallel_degree": 1, **SHARDED}),
    ],
    ids=["stages", "shards"],
)
def test_gradients_are_gone_when_the_next_step_begins(ranks, smp, accumulated, tmp_path):
    for alive in on_ranks(old_gradients_in_steps, ranks, tmp_path, smp, accumulated):
        assert set(alive) == {0}


def old_gradients_with_a_hook(folder):
    seen = []
    hooks = {"on_before_zero_grad": lambda self, optimizer: seen.append(next(self.parameters()).grad is not None)}
    return old_gradients_in_steps(folder, {"pipeline_parallel_degree": 1}, 1, **hooks), seen


def test_a_hook_that_may_look_at_them_still_can(tmp_path):
    [(alive, seen)] = on_ranks(old_gradients_with_a_hook, 1, tmp_path)
    first, *later = alive  # what the dry run noted is undone
    assert first == 0
    assert later
    assert all(later)
    assert seen == [False] + [True] * (len(seen) - 1)
