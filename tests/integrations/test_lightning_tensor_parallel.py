"""``tensor_parallel_degree`` under Lightning: the checkpoint of one process, whatever the layout."""

import pytest
import torch
from lightning_checks import CASES, assert_averages, assert_close, assert_goes_on, assert_resumed, fit
from lightning_toy import on_ranks, quiet, toy_loader, toy_module, toy_trainer

SPLIT = {
    "pipeline_parallel_degree": 1,
    "tensor_parallel_degree": 2,
    "tensor_parallel": {"net.0": "column", "net.2": "row", "net.4": "column", "net.6": "row"},
}
LAYOUTS = {
    "2 parts": (2, SPLIT),
    "2 parts of 2 replicas": (4, SPLIT),
    "2 parts of 2 stages": (4, {**SPLIT, "pipeline_parallel_degree": 2, "microbatches": 2}),
    "2 parts of 2 shards": (4, {**SPLIT, "sharded_data_parallel_degree": 2}),
    "2 parts of 2 replicas that deal out state": (4, {**SPLIT, "shard_optimizer_state": True}),
}
OWN = {**SPLIT, "prescaled_batch": False}
OWN_SAMPLES = {
    "2 parts": (2, OWN),
    "4 parts": (4, {**OWN, "tensor_parallel_degree": 4}),
    "2 parts of 2 stages": (4, {**OWN, "pipeline_parallel_degree": 2, "microbatches": 2}),
    "2 parts of 2 replicas": (4, OWN),
}
NAMES = sorted(CASES.keys() - {"whole matrices"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_split_layers_have_the_checkpoint_of_one_process(name, layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    with quiet():
        expected, everything, _, norm = fit(tmp_path / "one", name, None)
    found = on_ranks(fit, ranks, tmp_path / "smp", name, smp)
    if name != "mixed precision":  # sums of parts are rounded to bfloat16 apart
        assert_close(found[0][0], expected)
    assert set.union(*(kept for _, kept, _, _ in found)) == everything
    assert all(each == pytest.approx(norm, rel=1e-5) if norm else each is None for *_, each in found)


@pytest.mark.parametrize("layout", OWN_SAMPLES)
@pytest.mark.parametrize("name", ["clipping by norm", "manual optimization"])
def test_parts_with_samples_of_their_own_have_the_checkpoint_of_one_process_with_all_of_them(name, layout, tmp_path):
    ranks, smp = OWN_SAMPLES[layout]
    with quiet():
        expected, _, _, norm = fit(tmp_path / "one", name, None)
    found = on_ranks(fit, ranks, tmp_path / "smp", name, smp)
    assert_close(found[0][0], expected)
    assert all(each == pytest.approx(norm, rel=1e-5) if norm else each is None for *_, each in found)


@pytest.mark.parametrize(("before", "after"), [(SPLIT, None), (None, SPLIT), (SPLIT, SPLIT)])
def test_a_checkpoint_of_one_is_resumed_by_the_other(before, after, tmp_path):
    assert_resumed(tmp_path, before, after)


def test_averages_of_weights_are_those_of_one_process(tmp_path):
    assert_averages(tmp_path, SPLIT)


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["rank_zero", "none"])
def test_a_run_goes_on_with_what_another_has_left_on_some_ranks(where, layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    assert_goes_on(tmp_path, ranks, smp, where)


def warming_up(self):
    """A schedule over all steps of the run, as many models have one: it asks for their number."""
    optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)
    steps = int(self.trainer.estimated_stepping_batches)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=steps)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def run_warming_up(folder, smp):
    module = toy_module(configure_optimizers=warming_up, train_dataloader=lambda self: toy_loader(shuffle=False))
    trainer = toy_trainer(folder, smp=smp)
    trainer.fit(module)
    schedule = trainer.lr_scheduler_configs[0].scheduler
    return schedule.total_iters, {name: each.detach().clone() for name, each in module.named_parameters()}


@pytest.mark.parametrize("layout", ["2 parts", "2 parts of 2 stages"])
def test_a_schedule_over_all_steps_of_the_run_is_that_of_one_process(layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    with quiet():
        steps, weights = run_warming_up(tmp_path / "one", None)
    for found_steps, found in on_ranks(run_warming_up, ranks, tmp_path / "smp", smp):
        assert found_steps == steps == 12
        torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)


class Hidden:
    """Steps of other kinds that look at what lies between layers which the first step has shown to be a pair."""

    def validation_step(self, batch, batch_idx):
        hidden = self.net[:2](batch[0])
        self.log("spread", hidden.std(-1).mean())

    def predict_step(self, batch, batch_idx):
        return self.net[:6](batch[0])


def run_hidden(folder, smp):
    overrides = {name: vars(Hidden)[name] for name in ("validation_step", "predict_step")}
    loader = toy_loader(shuffle=False)
    module = toy_module(**overrides)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, loader, loader)
    spread = float(trainer.callback_metrics["spread"])
    return spread, trainer.predict(module, toy_loader(shuffle=False))


# Stages part the layers of a pair, so each is named.
STAGES = {
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "tensor_parallel": {f"net.{n}": "column" for n in (0, 2, 4, 6)},
}


@pytest.mark.parametrize("options", [{}, STAGES], ids=["2 parts", "stages"])
def test_steps_of_other_kinds_see_whole_features_between_layers_of_a_pair(options, tmp_path):
    smp = {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, **options}
    with quiet():
        spread, features = run_hidden(tmp_path / "one", None)
    for found_spread, found in on_ranks(run_hidden, 2 * smp["pipeline_parallel_degree"], tmp_path / "smp", smp):
        assert found_spread == pytest.approx(spread, rel=1e-5)
        torch.testing.assert_close(torch.cat(found), torch.cat(features), rtol=1e-5, atol=1e-6)


def normalize_gradient(self):
    self.net[0].weight.register_hook(lambda gradient: gradient / gradient.norm())


def run_hooked(folder, smp, when):
    module = toy_module(**{when: normalize_gradient})
    loader = toy_loader(shuffle=False)
    toy_trainer(folder, smp=smp, max_epochs=1, num_sanity_val_steps=1).fit(module, loader, loader)
    return module.state_dict()


def test_a_hook_on_a_gradient_sees_all_of_it(tmp_path):
    smp = {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2}
    with quiet():
        expected = run_hooked(tmp_path / "one", None, "on_fit_start")
    for found in on_ranks(run_hooked, 2, tmp_path / "smp", smp, "on_fit_start"):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_hook_on_a_gradient_that_comes_after_layers_are_split_is_refused(tmp_path):
    smp = {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2}
    error = r"a hook on the gradient of `net\.0\.weight` would see a part of it. Register it before the first step"
    with pytest.raises(RuntimeError, match=error):
        on_ranks(run_hooked, 2, tmp_path, smp, "on_train_start")
