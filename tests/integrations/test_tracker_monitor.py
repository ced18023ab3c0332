"""``SMPMonitor`` in loops with Accelerate, and as a callback of Hugging Face's Trainer."""

import json
import warnings
from importlib import import_module

import pytest
import torch
from accelerate_checks import BATCH, adamw, batches, fresh_accelerator, loss_inside, toy, whole_state
from accelerate_checks import on_ranks as accelerated
from hf_checks import EXACT, LENGTH, text_trainer
from hf_checks import on_ranks as trained_on

from smp_strategy import SMPError
from smp_strategy.integrations.accelerate import SMPMonitor
from smp_strategy.pipeline.microbatch import split

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 4}


def sick_batches():
    """The second of three batches has an infinite input, in microbatch 1."""
    found = batches(3)
    found[1]["inputs"][2, 0] = torch.inf
    return found


def loop(nonfinite, smp):
    accelerator = fresh_accelerator(smp)
    model = toy()
    model, optimizer = accelerator.prepare(model, adamw(model))
    monitor, figures = SMPMonitor(nonfinite).attach(accelerator), []
    for batch in sick_batches():
        accelerator.backward(loss_inside(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        figures.append((monitor.figures(), optimizer.step_was_skipped))
    return whole_state(accelerator), figures


def test_a_loop_skips_the_update_and_has_figures():
    model = toy()
    optimizer = adamw(model)
    for batch in sick_batches():
        for part in split(batch, 4)[0]:
            (loss_inside(model, part) / 4).backward()
        if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()
    expected = model.state_dict()
    (weights, figures), (_, others) = accelerated(loop, 2, "skip", PP2)
    assert figures == others
    assert [was_skipped for _, was_skipped in figures] == [False, True, False]
    assert [found["smp/nonfinite_updates"] for found, _ in figures] == [0, 1, 1]
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    for found, _ in figures:
        assert found["smp/samples_per_second"] * found["smp/step_seconds"] == pytest.approx(BATCH)
        assert 0 < found["smp/bubble"] < 1


def test_the_class_is_found_by_its_name():
    assert import_module(SMPMonitor.__module__).SMPMonitor is SMPMonitor


def test_without_attach_the_error_says_so():
    with pytest.raises(SMPError, match=r"call `monitor.attach\(accelerator\)` after `prepare`"):
        SMPMonitor().figures()


def actions_in(path):
    """Names of the measured actions in a trace, by rank."""
    measured = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("cat") == "measured"]
    ranks = {each["pid"] - 1 for each in measured}
    return {rank: {each["name"] for each in measured if each["pid"] == rank + 1} for rank in ranks}


ACTIONS = {kind + str(number) for kind in "FB" for number in range(4)}


def traced_loop(folder, is_given):
    accelerator = fresh_accelerator({**PP2, "pipeline": "1f1b"}, project_dir=str(folder / "project"))
    model = toy()
    model, optimizer = accelerator.prepare(model, adamw(model))
    SMPMonitor(trace_steps=[1, 3], trace_folder=folder / "given" if is_given else None).attach(accelerator)
    for batch in batches(3):
        accelerator.backward(loss_inside(model, batch))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("is_given", [True, False])
def test_chosen_steps_of_a_loop_are_traced_over_all_stages(tmp_path, is_given):
    accelerated(traced_loop, 2, tmp_path, is_given)
    folder = tmp_path / ("given" if is_given else "project")
    assert sorted(path.name for path in folder.glob("*.json")) == ["step-1.json", "step-3.json"]
    for number in (1, 3):
        assert actions_in(folder / f"step-{number}.json") == {0: ACTIONS, 1: ACTIONS}


def hf_traced(folder):
    trainer = text_trainer(folder, {**PP2, "pipeline": "1f1b"}, callbacks=[SMPMonitor(trace_steps=[2])], **EXACT)
    trainer.train()


def test_a_chosen_step_of_the_trainer_is_traced_in_its_output_folder(tmp_path):
    trained_on(hf_traced, 2, tmp_path)
    assert [path.name for path in tmp_path.rglob("step-*.json")] == ["step-2.json"]
    (path,) = tmp_path.rglob("step-2.json")
    assert actions_in(path) == {0: ACTIONS, 1: ACTIONS}


def hf_run(folder, smp):
    trainer = text_trainer(folder, smp, callbacks=[SMPMonitor()], logging_steps=2, **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_figures_stand_beside_the_loss_that_the_trainer_logs(tmp_path):
    entries, others = trained_on(hf_run, 2, tmp_path, {"sharded_data_parallel_degree": 2})
    # Two replicas with 32 sequences in batches of 8 each: two updates.
    assert len(entries) == 1
    found, other = entries[0], others[0]
    assert found["smp/samples_per_second"] * found["smp/step_seconds"] == pytest.approx(16)
    assert found["smp/tokens_per_second"] * found["smp/step_seconds"] == pytest.approx(16 * LENGTH)
    assert found["smp/gather_wait_seconds"] > 0
    assert found["smp/tokens_per_second"] == other["smp/tokens_per_second"]
