"""``precision=`` of the Trainer and steps that run their own backwards and optimizers: which scale counts when."""

import pytest
import torch
from lightning_precision import LAYOUTS, RESTLESS, STAGES, STEPS, assert_same, by_hand, by_step, fit, in_one, on
from lightning_toy import on_ranks

from smp_strategy.errors import PeerFailedError, UnsupportedError


def is_manual(self):
    return False


def both_after_one_backward(self):
    parts = [self.net[:4], self.net[4:]]
    return [torch.optim.AdamW(part.parameters(), lr=0.05, eps=1e-3) for part in parts], []


def manual_step(self, batch, batch_idx):
    for optimizer in self.optimizers():
        optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    for optimizer in self.optimizers():
        optimizer.step()


def one_after_the_other(self, batch, batch_idx):
    for optimizer in self.optimizers():
        self.toggle_optimizer(optimizer)
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)


MANUAL = {"automatic_optimization": property(is_manual), "configure_optimizers": both_after_one_backward}


@pytest.mark.parametrize("pp", [2, 4])
def test_optimizers_that_step_after_backwards_of_their_own_have_the_weights_of_plain_lightning(pp, tmp_path):
    overrides = {**MANUAL, "training_step": one_after_the_other}
    expected = in_one(tmp_path / "one", "16-mixed", RESTLESS, overrides=overrides)
    smp = {"pipeline_parallel_degree": pp, "microbatches": 1}
    assert_same(on(pp, tmp_path / "smp", smp, "16-mixed", RESTLESS, overrides=overrides), expected)


def scheduled(self, batch, batch_idx):
    [optimizer] = [self.optimizers()]
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
    optimizer.step()
    self.lr_schedulers().step()


@pytest.mark.parametrize("layout", ["two stages", "four stages", *LAYOUTS])
def test_a_manual_step_divides_before_it_clips(layout, tmp_path):
    ranks, smp = {**STAGES, **LAYOUTS}[layout]
    is_split, replicas = "tensor_parallel_degree" in smp, ranks // smp["pipeline_parallel_degree"]
    overrides = {**MANUAL, "training_step": scheduled, "configure_optimizers": by_step}
    smp = {**smp, "microbatches": 1}
    found = on(ranks, tmp_path, smp, "16-mixed", RESTLESS, per_replica=True, overrides=overrides)
    weights, steps, scale = by_hand(1 if is_split else replicas)
    tolerance = 0.0 if layout in STAGES else 2e-2 if is_split else 1e-6
    torch.testing.assert_close(found["state_dict"], weights, rtol=tolerance, atol=tolerance)
    assert found["lr_schedulers"][0]["last_epoch"] == steps < STEPS
    assert found["MixedPrecision"]["scale"] == scale


def test_optimizers_that_step_after_one_backward_divide_by_its_scale(tmp_path):
    """Plain Lightning divides the second one's gradients by what the first one's step has made of the scale."""
    never = {"init_scale": 2.0**4, "growth_interval": 1000}
    grows = {"init_scale": 2.0**4, "growth_interval": 1}
    overrides = {**MANUAL, "training_step": manual_step}
    expected = in_one(tmp_path / "one", "16-mixed", never, overrides=overrides)
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1}
    found = on(2, tmp_path / "smp", smp, "16-mixed", {**grows, "growth_factor": 1.0001}, overrides=overrides)
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-2, atol=1e-2)
    assert found["MixedPrecision"]["scale"] > 2.0**4


def steps_of_two_lengths(self, batch, batch_idx):
    often, seldom = self.optimizers()
    self.manual_backward(self.loss(batch))
    often.step()
    often.zero_grad()
    if batch_idx % 3 == 2:
        seldom.step()
        seldom.zero_grad()


@pytest.mark.dear
@pytest.mark.parametrize("layout", ["two stages", "shards of stages", "state dealt out"])
def test_an_optimizer_may_collect_gradients_while_another_changes_the_scale(layout, tmp_path):
    ranks, smp = {**STAGES, **LAYOUTS}[layout]
    overrides = {**MANUAL, "training_step": steps_of_two_lengths}
    smp = {**smp, "microbatches": 1}
    args = {"per_replica": True, "overrides": overrides}
    expected = on(ranks, tmp_path / "one", {**smp, "loss_scale": 16.0}, "16-mixed", **args)
    grows = {"init_scale": 16.0, "growth_interval": 1}
    found = on(ranks, tmp_path / "smp", smp, "16-mixed", grows, **args)
    assert found["MixedPrecision"]["scale"] > 16.0
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-3, atol=1e-3)


def clipped_before_any_steps(self, batch, batch_idx):
    optimizers = self.optimizers()
    self.manual_backward(self.loss(batch))
    for optimizer in optimizers:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def clipped_while_they_collect(self, batch, batch_idx):
    self.manual_backward(self.loss(batch))
    for optimizer in self.optimizers():
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.dear
@pytest.mark.parametrize("step", [clipped_before_any_steps, clipped_while_they_collect])
@pytest.mark.parametrize("layout", ["two stages", "shards of stages", "state dealt out"])
def test_gradients_may_be_clipped_long_before_they_are_applied(layout, step, tmp_path):
    ranks, smp = {**STAGES, **LAYOUTS}[layout]
    args = {"per_replica": True, "overrides": {**MANUAL, "training_step": step}}
    smp = {**smp, "microbatches": 1}
    small, large = (
        on(ranks, tmp_path / f"{scale}", {**smp, "loss_scale": scale}, "16-mixed", **args)["state_dict"]
        for scale in (1.0, 1024.0)
    )
    torch.testing.assert_close(large, small, rtol=1e-3, atol=1e-3)


def bare(self, batch, batch_idx):
    self.manual_backward(self.loss(batch))
    for optimizer in self.optimizers(use_pl_optimizer=False):
        optimizer.step()


def failing(folder, smp, overrides):
    try:
        fit(folder, smp, "16-mixed", overrides=overrides)
    except (UnsupportedError, PeerFailedError) as error:
        return str(error)
    return None


def test_a_bare_optimizer_does_not_apply_scaled_gradients(tmp_path):
    overrides = {**MANUAL, "training_step": bare}
    [found] = on_ranks(failing, 1, tmp_path, {"microbatches": 1}, overrides)
    assert "bare optimizer" in found
