"""``SMPMonitor`` under Lightning: its figures reach the loggers, and NaN is found where it comes from."""

import csv
import json
import os
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning_toy import FEATURES, NEWER, OLDER, on_ranks, quiet, toy_loader, toy_module, toy_trainer
from torch import nn

from smp_strategy import ConfigError, SMPError
from smp_strategy.integrations.lightning import make_monitor

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 4}
BATCH, SICK = 8, 100.0


class Block(nn.Module):
    """A unit that is ill for marked samples: it returns NaN, or its backward does."""

    def __init__(self, illness="") -> None:
        super().__init__()
        self.linear, self.illness = nn.Linear(FEATURES, FEATURES), illness

    def forward(self, x, is_sick):
        out = torch.tanh(self.linear(x))
        if self.illness == "forward":
            return torch.where(is_sick, torch.full_like(out, torch.nan), out)
        if self.illness == "backward":  # the root of nought has an infinite slope
            return out + torch.where(is_sick, out * 0.0, 1.0 + 0.0 * out).sqrt()
        return out


class Ill(pl.LightningModule):
    """Four blocks, one of which is ill."""

    def __init__(self, illness, ill) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(illness if number == ill else "") for number in range(4))

    def training_step(self, x, batch_idx):
        is_sick = x[:, :1] >= SICK
        x = torch.where(is_sick, torch.ones_like(x), x)
        for block in self.blocks:
            x = x + block(x, is_sick)
        return x.square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def samples():
    """Three batches; in the second one the sixth sample is marked, which is in microbatch 2."""
    found = torch.randn(3 * BATCH, FEATURES, generator=torch.Generator().manual_seed(0))
    found[BATCH + 5, 0] = SICK
    return found


def trained(folder, nonfinite, illness, ill=3):
    module = Ill(illness, ill)
    monitor = make_monitor(NEWER)(nonfinite=nonfinite)
    trainer = toy_trainer(folder, smp=PP2, max_epochs=1, callbacks=[monitor])
    trainer.fit(module, torch.utils.data.DataLoader(samples(), batch_size=BATCH))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, monitor.monitor.num_nonfinite


def found_in(folder, *illness):
    with quiet(), pytest.raises(SMPError) as caught:
        trained(folder, "raise", *illness)
    return str(caught.value)


def skipping_plainly(illness):
    """The weights of a plain loop that leaves out updates whose gradients are not finite."""
    module = Ill(illness, 3)
    config = module.configure_optimizers()
    optimizer, scheduler = config["optimizer"], config["lr_scheduler"]["scheduler"]
    for batch in samples().split(BATCH):
        optimizer.zero_grad()
        for microbatch in batch.chunk(4):
            (module.training_step(microbatch, 0) / 4).backward()
        if all(parameter.grad.isfinite().all() for parameter in module.parameters()):
            optimizer.step()
            scheduler.step()
    return module.state_dict()


@pytest.mark.parametrize("illness", ["forward", "backward"])
@pytest.mark.parametrize(("ill", "stage"), [(1, 0), (3, 1)])
def test_nan_is_named_by_all_ranks(tmp_path, illness, ill, stage):
    said = on_ranks(found_in, 2, tmp_path, illness, ill)
    assert said[0] == said[1]
    what = {"forward": "output", "backward": "backward"}[illness]
    where = f"the {what} of unit `blocks.{ill}` (stage {stage}) in microbatch 2 of training step 2"
    assert said[0].startswith(f"Gradients are NaN or infinite. They come from {where}")
    assert "SMPMonitor(nonfinite='skip')" in said[0]


@pytest.mark.parametrize("illness", ["forward", "backward"])
def test_a_skipped_update_leaves_the_weights_of_a_plain_loop_that_skips(tmp_path, illness):
    expected = skipping_plainly(illness)
    for weights, num_skipped in on_ranks(trained, 2, tmp_path, "skip", illness):
        assert num_skipped == 1
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


LAYOUTS = [
    PP2,
    {"sharded_data_parallel_degree": 2, "microbatches": 2},
    {"shard_optimizer_state": True, "pipeline_parallel_degree": 1},
]


def with_and_without(folder, smp):
    found = []
    for callbacks in ([], [make_monitor(NEWER)()]):
        module = toy_module()
        options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "callbacks": callbacks}
        trainer = toy_trainer(folder, smp=smp, max_epochs=1, **options)
        trainer.fit(module, toy_loader(), toy_loader(shuffle=False))
        found.append({name: value.clone() for name, value in module.state_dict().items()})
        assert trainer.precision_plugin.scaler is None
    return found


@pytest.mark.parametrize("smp", LAYOUTS, ids=["pp2", "sdp2", "zero1"])
def test_a_monitor_changes_no_weight(tmp_path, smp):
    for without, watched in on_ranks(with_and_without, 2, tmp_path, smp):
        assert all(torch.equal(without[name], value) for name, value in watched.items())


def test_ignored_nan_reaches_the_weights(tmp_path):
    weights, num_found = on_ranks(trained, 2, tmp_path, "ignore", "forward")[0]
    assert num_found == 0
    assert weights["blocks.0.linear.weight"].isnan().all()


def test_another_policy_is_refused():
    with pytest.raises(ConfigError, match="`nonfinite` of SMPMonitor must be one of `raise`, `skip`, `ignore`, but is"):
        make_monitor(NEWER)(nonfinite="warn")


def logged(folder, root, smp):
    """Figures where users find them, of a run of six steps that logs every second one."""
    loggers = pytest.importorskip(f"{root}.loggers")
    logger = loggers.CSVLogger(folder, flush_logs_every_n_steps=1)
    options = {"logger": logger, "log_every_n_steps": 2, "callbacks": [make_monitor(root)(trace_steps=[3])]}
    trainer = toy_trainer(folder, root, smp=smp, max_epochs=1, **options)
    trainer.fit(toy_module(root), toy_loader(), toy_loader(shuffle=False))
    return dict(trainer.callback_metrics), list(trainer.progress_bar_metrics)


@pytest.mark.parametrize("root", [NEWER, OLDER])
def test_figures_reach_logger_and_progress_bar(tmp_path, root):
    found = on_ranks(logged, 2, tmp_path, root, PP2)
    metrics, shown = found[0]
    assert {name: float(value) for name, value in metrics.items()} == {
        name: float(value) for name, value in found[1][0].items()
    }
    per_step = float(metrics["smp/step_seconds"])
    assert float(metrics["smp/samples_per_second"]) * per_step == pytest.approx(BATCH, rel=1e-4)
    assert 0 < float(metrics["smp/bubble"]) < 1
    assert float(metrics["smp/memory_gib"]) == pytest.approx(float(metrics["smp/memory_predicted_gib"]), rel=0.05)
    assert metrics["smp/nonfinite_updates"] == 0
    # Four linear layers, times two for forward and four for backward, without the input's gradient of the first one.
    products = [FEATURES * 16, 16 * 16, 16 * 16, 16 * 4]
    flops = 6 * sum(products) - 2 * products[0]
    expected = flops * BATCH / 2 / per_step / 1e12
    assert float(metrics["smp/tflops_per_device"]) == pytest.approx(expected, rel=1e-3)
    assert {"smp/bubble", "smp/memory_gib"} <= set(shown)
    assert "smp/tokens_per_second" not in metrics
    assert "smp/mfu" not in metrics
    assert "smp/loss_scale" not in metrics
    rows = list(csv.DictReader(next(tmp_path.glob("**/metrics.csv")).read_text().splitlines()))
    assert [row["step"] for row in rows if row["smp/samples_per_second"]] == ["1", "3", "5"]
    assert json.loads(next(tmp_path.glob("**/step-3.json")).read_text())["traceEvents"]


def test_the_loss_scale_is_a_figure(tmp_path):
    smp = {**PP2, "fp16": True, "init_scale": 1024.0}
    metrics, _ = on_ranks(logged, 2, tmp_path, NEWER, smp)[0]
    assert metrics["smp/loss_scale"] == 1024


def run_page(folder):
    os.chdir(folder)
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    names = {"__name__": "script"}
    exec(compile(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], "docs/monitoring.md", "exec"), names)
    return float(names["trainer"].callback_metrics["smp/samples_per_second"])


def test_the_script_in_the_page_about_monitoring_trains(tmp_path):
    first, second = on_ranks(run_page, 2, tmp_path)
    assert first == second > 0


def without_strategy(folder):
    monitor = make_monitor(NEWER)()
    trainer = toy_trainer(folder, max_epochs=1, callbacks=[monitor])
    with pytest.warns(UserWarning, match=re.escape("measures runs of the strategy `smp` only")):
        trainer.fit(toy_module(), toy_loader(), toy_loader(shuffle=False))
    return len(trainer.callback_metrics)


def test_a_run_without_the_strategy_is_not_measured(tmp_path):
    assert on_ranks(without_strategy, 1, tmp_path) == [4]
