"""``trainer.strategy.memory_report()``: what each rank holds, in a callback on all ranks."""

import json

import pytest
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
