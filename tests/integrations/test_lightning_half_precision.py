"""``bf16`` under Lightning: float32 checkpoints, and in every layout that of one rank.

That one rank has the weights of a process that casts by hand is checked in `tests/ranks/test_half_precision.py`.
"""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from lightning_checks import CASES, assert_close, fit
from lightning_toy import NEWER, metrics_of, on_ranks, quiet, toy_loader, toy_module, toy_trainer

from smp_strategy.errors import ConfigError

EMAWeightAveraging = import_module(f"{NEWER}.callbacks").EMAWeightAveraging

ALONE = {"pipeline_parallel_degree": 1, "microbatches": 2, "bf16": True}
SHARDED = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2, "bf16": True}
LAYOUTS = {
    "2 stages": (2, {**ALONE, "pipeline_parallel_degree": 2}),
    "2 shards": (2, SHARDED),
    "2 shards of 2 stages": (4, {**SHARDED, "pipeline_parallel_degree": 2, "microbatches": 1}),
    "state of 2 replicas": (2, {"pipeline_parallel_degree": 1, "shard_optimizer_state": True, "bf16": True}),
}
NAMES = sorted(CASES.keys() - {"mixed precision"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_has_the_float32_checkpoint_of_one_rank(name, layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    if name == "whole matrices" and "sharded_data_parallel_degree" in smp:
        pytest.skip("an optimizer of whole matrices is refused")
    [(expected, _, _, norm)] = on_ranks(fit, 1, tmp_path / "one", name, ALONE)
    found = on_ranks(fit, ranks, tmp_path / "smp", name, smp)
    assert {tensor.dtype for tensor in expected["state_dict"].values()} == {torch.float32}
    assert_close(found[0][0], expected)
    assert all(each == pytest.approx(norm, rel=1e-5) if norm else each is None for *_, each in found)


@pytest.mark.parametrize("layout", ["2 stages", "2 shards of 2 stages"])
def test_half_precision_is_close_to_full(layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    with quiet():
        expected = fit(tmp_path / "one", "clipping by norm", None)[0]["state_dict"]
    found = on_ranks(fit, ranks, tmp_path / "smp", "clipping by norm", smp)[0][0]["state_dict"]
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0.05, atol=0.05)
    assert any(not torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_lightning_goes_on_with_masters_and_they_with_what_it_has_saved(layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    name = "accumulation"
    first = on_ranks(fit, ranks, tmp_path / "first", name, smp)[0][0]
    with quiet():
        fit(tmp_path / "plain", name, None)
        gone_on = fit(tmp_path / "on", name, None, 2, tmp_path / "first" / "end.ckpt")[0]
    assert gone_on["global_step"] == 2 * first["global_step"]
    [(expected, *_)] = on_ranks(fit, 1, tmp_path / "one", name, ALONE, 2, tmp_path / "plain" / "end.ckpt")
    found = on_ranks(fit, ranks, tmp_path / "smp", name, smp, 2, tmp_path / "plain" / "end.ckpt")[0][0]
    assert_close(found, expected)


class Averages(EMAWeightAveraging):
    """Notes weights after each batch, the dtypes of the averages, and what evaluation sees of them."""

    def __init__(self):
        super().__init__(decay=0.5)
        self.trained, self.dtypes, self.seen = [], set(), []

    def on_train_batch_end(self, trainer, pl_module, *args, **kwargs):
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        self.dtypes |= {parameter.dtype for parameter in self._average_model.parameters()}
        self.trained.append({name: each.detach().clone() for name, each in pl_module.named_parameters()})

    def on_validation_batch_start(self, trainer, pl_module, *args, **kwargs):
        if not trainer.sanity_checking:
            self.seen.append({name: each.detach().clone() for name, each in pl_module.named_parameters()})


def averaged(folder, smp):
    callback = Averages()
    trainer = toy_trainer(folder, smp=smp, max_epochs=2, callbacks=[callback])
    module = toy_module()
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
    trainer.save_checkpoint(folder / "end.ckpt")
    saved = torch.load(folder / "end.ckpt", weights_only=False)["state_dict"]  # the average, at the end
    return callback.trained, callback.dtypes, callback.seen[-1], metrics_of(trainer), saved


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_averages_are_kept_in_float32_and_evaluated_with(layout, tmp_path):
    ranks, smp = (1, ALONE) if layout == "alone" else LAYOUTS[layout]
    found = on_ranks(averaged, ranks, tmp_path / "smp", smp)
    trained, dtypes, seen, _, average = found[0]
    expected, *later = trained
    for weights in later:
        expected = {name: value.lerp(weights[name], 0.5) for name, value in expected.items()}
    assert dtypes == {torch.float32}
    for name, value in expected.items():
        torch.testing.assert_close(average[name], value, rtol=0, atol=1e-6)
        assert torch.equal(seen[name], average[name])
        assert not torch.equal(average[name], average[name].bfloat16().float())
        assert not torch.equal(average[name], trained[-1][name])
    # With the average as its weights a module has the same loss.
    [expected] = on_ranks(validated, 1, tmp_path / "again", average)
    losses = [metrics["val_loss"] for *_, metrics, _ in found]  # replicas have read samples of their own
    assert sum(losses) / len(losses) == pytest.approx(expected["val_loss"], rel=1e-5)


def validated(folder, weights):
    module = toy_module()
    module.load_state_dict(weights)
    trainer = toy_trainer(folder, smp=ALONE)
    trainer.validate(module, toy_loader(shuffle=False))
    return metrics_of(trainer)


def trains_halves(folder, smp):
    module = toy_module().bfloat16()
    trainer = toy_trainer(folder, smp=smp)
    try:
        trainer.fit(module, toy_loader())
    except ConfigError as error:
        return str(error), module.seen
    return None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_that_has_no_float32_weights_is_refused_before_training(layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    for text, seen in on_ranks(trains_halves, ranks, tmp_path, smp):
        assert "`bf16=True` has no float32 master" in text
        assert seen == []


def is_automatic(self):
    return False


def descend(self):
    return torch.optim.SGD(self.parameters(), lr=0.5)


def steps(self, batch, batch_idx):
    inputs, targets = batch
    for _ in range(self.times):
        loss = F.cross_entropy(self.net(inputs @ self.before) @ self.after, targets)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


def manually(folder, smp, times):
    """Two optimizer steps on each batch: in one training step, or in two."""
    overrides = {"automatic_optimization": property(is_automatic), "configure_optimizers": descend}
    module = toy_module(training_step=steps, **overrides)
    module.times = times
    module.before, module.after = torch.nn.Parameter(torch.eye(8)), torch.nn.Parameter(torch.eye(4))
    batches = [batch for batch in toy_loader(shuffle=False) for _ in range(2 // times)]
    toy_trainer(folder, smp=smp, max_epochs=1).fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return module.state_dict()


@pytest.mark.parametrize("pp", [1, 2])
def test_weights_above_the_units_are_new_after_a_step_of_the_optimizer_in_a_training_step(pp, tmp_path):
    smp = {"pipeline_parallel_degree": pp, "microbatches": 1, "bf16": True}
    once, twice = (on_ranks(manually, pp, tmp_path / f"{times}", smp, times)[0] for times in (1, 2))
    for name, value in once.items():
        assert torch.equal(twice[name], value), name
