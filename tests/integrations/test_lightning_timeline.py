"""What really happened, asked for where users of Lightning do: in callbacks, and after the run."""

import json

import pytest
from lightning_toy import NEWER, OLDER, on_ranks, toy_loader, toy_module, toy_trainer

from smp_strategy import SMPError


def saves(folder, root, pp):
    module, asked = toy_module(root), []

    def too_early():
        with pytest.raises(SMPError, match="no training step has run after a timetable"):
            trainer.strategy.timeline()

    def after_a_batch(outputs, batch, batch_idx):
        if batch_idx:  # the first one came after validation, and its path was new
            asked.append(trainer.strategy.timeline().step)

    def at_the_end():
        trainer.strategy.timeline().save(folder / "runs" / "timeline.html")

    module.on_train_start = too_early
    module.on_train_batch_end = after_a_batch
    smp = {"pipeline_parallel_degree": pp, "microbatches": 4, "pipeline": "1f1b"}
    trainer = toy_trainer(folder, root, smp=smp, max_epochs=1, callbacks=[callback(root, at_the_end)])
    trainer.fit(module, toy_loader(), toy_loader(shuffle=False))
    timeline = trainer.strategy.timeline()
    timeline.save(folder / "timeline.json")
    return asked, timeline.ranks, timeline.stages, str(timeline)


def callback(root, at_the_end):
    base = pytest.importorskip(f"{root}.callbacks").Callback
    return type("Saves", (base,), {"on_train_end": lambda self, trainer, module: at_the_end()})()


@pytest.mark.parametrize("root", [NEWER, OLDER])
def test_a_callback_on_all_ranks_saves_the_timeline_once(root, tmp_path):
    found = on_ranks(saves, 2, tmp_path, root, 2)
    assert found[0] == found[1]
    asked, ranks, _, text = found[0]
    assert asked == [2, 3, 4, 5, 6]
    assert ranks == (1, 0)
    assert text.startswith("Training step 6 took ")
    assert (tmp_path / "runs" / "timeline.html").read_text().startswith("<!doctype html>")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}


def test_each_replica_has_its_own_and_the_first_one_is_written(tmp_path):
    found = on_ranks(saves, 4, tmp_path, NEWER, 2)
    assert [ranks for _, ranks, _, _ in found] == [(1, 0), (1, 0), (3, 2), (3, 2)]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0][2] != found[2][2]
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}
