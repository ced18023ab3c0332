"""``precision=`` of the Trainer: the checkpoint of plain Lightning, with whatever losses are scaled by."""

import math
from importlib import import_module

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning_precision import (
    BATCH,
    LAYOUTS,
    PRECISIONS,
    RESTLESS,
    STAGES,
    STEPS,
    assert_same,
    by_hand,
    by_step,
    fit,
    in_one,
    on,
    without_scheduler,
)
from lightning_toy import OLDER, on_ranks, quiet, toy_data, toy_module, toy_trainer
from torch.utils.data import DataLoader

from smp_strategy.errors import ConfigError
from smp_strategy.integrations.lightning.validation import refuse_unsupported


@pytest.mark.parametrize(
    ("precision", "ranks"), [*((each, 2) for each in PRECISIONS), ("16-mixed", 1), ("16-mixed", 4), ("16-true", 4)]
)
def test_every_precision_has_the_checkpoint_of_plain_lightning(precision, ranks, tmp_path):
    # A norm of gradients that are half is rounded to half in one process, and here it is not.
    options = {} if precision in ("16-true", "bf16-true") else {"gradient_clip_val": 0.5}
    expected = in_one(tmp_path / "one", precision, **options)
    smp = {"pipeline_parallel_degree": ranks, "microbatches": 1}
    assert_same(on(ranks, tmp_path / "smp", smp, precision, **options), expected)


@pytest.mark.parametrize("precision", PRECISIONS[:4])
def test_microbatches_are_rounded_as_batches_that_are_accumulated(precision, tmp_path):
    expected = in_one(tmp_path / "one", precision, accumulate_grad_batches=2, gradient_clip_val=0.5)
    smp = {"pipeline_parallel_degree": 2, "microbatches": 2}
    assert_same(on(2, tmp_path / "smp", smp, precision, gradient_clip_val=0.5), expected)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
@pytest.mark.parametrize("pp", [2, 4])
def test_steps_that_overflow_are_those_of_plain_lightning(pp, options, tmp_path):
    expected = in_one(tmp_path / "one", "16-mixed", RESTLESS, **options)
    skipped = expected["global_step"] - expected["optimizer_states"][0]["state"][0]["step"].item()
    assert 0 < skipped < expected["global_step"] - 1
    smp = {"pipeline_parallel_degree": pp, "microbatches": 1}
    assert_same(on(pp, tmp_path / "smp", smp, "16-mixed", RESTLESS, **options), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_skips_the_same_steps(layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    is_split = "tensor_parallel_degree" in smp
    weights, steps, scale = by_hand(1 if is_split else 2)
    overrides = {"configure_optimizers": by_step}
    found = on(
        ranks,
        tmp_path,
        {**smp, "microbatches": 1},
        "16-mixed",
        RESTLESS,
        per_replica=True,
        overrides=overrides,
        gradient_clip_val=0.1,
    )
    assert found["lr_schedulers"][0]["last_epoch"] == steps < STEPS
    assert found["MixedPrecision"]["scale"] == scale
    tolerance = 2e-2 if is_split else 1e-6  # sums of parts are rounded to float16 apart
    torch.testing.assert_close(found["state_dict"], weights, rtol=tolerance, atol=tolerance)


@pytest.mark.dear
def test_the_clipping_of_shards_divides_before_it_clips(tmp_path):
    ranks, smp = LAYOUTS["shards of stages"]
    smp = {**smp, "microbatches": 2}
    expected = on(ranks, tmp_path / "trainer", smp, "16-mixed", RESTLESS, per_replica=True, gradient_clip_val=0.1)
    smp = {**smp, "sdp_gradient_clipping": 0.1}
    assert_same(on(ranks, tmp_path / "strategy", smp, "16-mixed", RESTLESS, per_replica=True), expected)


@pytest.mark.parametrize("layout", ["two stages", "shards of stages"])
@pytest.mark.parametrize("half", [("16-mixed", {}), ("32-true", {"fp16": True, "init_scale": 2.0**23})])
def test_what_is_computed_again_overflows_again(half, layout, tmp_path):
    (precision, options), (ranks, smp) = half, {**STAGES, **LAYOUTS}[layout]
    smp = {**smp, **options, "microbatches": 2}
    args = (precision, RESTLESS if precision == "16-mixed" else None)
    expected = on(ranks, tmp_path / "kept", smp, *args)
    assert 0 < expected["optimizer_states"][0]["state"][0]["step"].item() < STEPS
    smp = {**smp, "activation_checkpointing": "all"}
    assert_same(on(ranks, tmp_path / "again", smp, *args), expected)


def skips(self, batch, batch_idx):
    return None if batch_idx in (0, 3) else self.loss(batch)


def test_a_batch_that_the_user_skips_does_not_count_for_the_scale(tmp_path):
    overrides = {"training_step": skips}
    expected = in_one(tmp_path / "one", "16-mixed", RESTLESS, overrides=overrides)
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1}
    assert_same(on(2, tmp_path / "smp", smp, "16-mixed", RESTLESS, overrides=overrides), expected)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_half_parameters_stay_half(precision, tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 2}
    for saved, dtypes in on_ranks(fit, 2, tmp_path, smp, precision):
        half = torch.float16 if precision == "16-true" else torch.bfloat16
        assert dtypes == [half, half]
        assert {each.dtype for each in saved["state_dict"].values()} == {half}
        assert "MixedPrecision" not in saved


def test_half_parameters_may_be_trained_with_scaled_losses(tmp_path):
    """By a power of two, so that only what would have vanished differs."""
    plain = on(2, tmp_path / "plain", {"pipeline_parallel_degree": 2, "microbatches": 1}, "16-true")
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1, "loss_scale": 256.0}
    found = on(2, tmp_path / "smp", smp, "16-true")
    torch.testing.assert_close(found["state_dict"], plain["state_dict"], rtol=1e-2, atol=1e-2)
    assert found["MixedPrecision"]["scale"] == 256.0
    # The first scale is no number of float16, in which the loss is.
    found = on(2, tmp_path / "dynamic", {**smp, "loss_scale": "dynamic"}, "16-true")
    assert found["MixedPrecision"]["scale"] < 65536
    assert 0 < found["optimizer_states"][0]["state"][0]["step"].item() < STEPS


def test_a_scheduler_that_goes_by_steps_passes_over_skipped_ones(tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1}
    found = on(2, tmp_path, smp, "16-mixed", RESTLESS, overrides={"configure_optimizers": by_step})
    steps = found["optimizer_states"][0]["state"][0]["step"].item()
    assert steps < found["global_step"] == STEPS
    [scheduler] = found["lr_schedulers"]
    assert scheduler["last_epoch"] == steps
    assert found["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.05 * 0.9**steps)


def by_epoch(self):
    optimizer = without_scheduler(self)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def test_a_scheduler_that_goes_by_epochs_does_not(tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1, "loss_scale": 2.0**60}  # overflows for ever
    found = on(2, tmp_path, smp, "16-mixed", epochs=3, overrides={"configure_optimizers": by_epoch})
    assert not found["optimizer_states"][0]["state"]
    assert found["lr_schedulers"][0]["last_epoch"] == 3


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, None), (None, 2)])
def test_the_scale_goes_on_where_a_checkpoint_has_left_it(before, after, tmp_path):
    """In the midst of the steps after which it grows, in either of plain Lightning and this strategy."""
    scaler = {"init_scale": 2.0**23, "growth_interval": 3}
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1}
    expected = in_one(tmp_path / "one", "16-mixed", scaler, epochs=2)
    for folder, ranks, epochs in (("first", before, 1), ("second", after, 2)):
        checkpoint = None if epochs == 1 else tmp_path / "first" / "end.ckpt"
        if ranks is None:
            found = in_one(tmp_path / folder, "16-mixed", scaler, epochs=epochs, checkpoint=checkpoint)
        else:
            found = on(2, tmp_path / folder, smp, "16-mixed", scaler, epochs=epochs, checkpoint=checkpoint)
        assert found["MixedPrecision"]["_growth_tracker"] != 0 or epochs == 2
    assert_same(found, expected)


def in_the_older_tree(folder, smp):
    module = toy_module(OLDER, train_dataloader=lambda self: DataLoader(toy_data(STEPS * BATCH), batch_size=BATCH))
    plugin = import_module(f"{OLDER}.plugins").MixedPrecision("16-mixed", "cpu")
    trainer = toy_trainer(folder, OLDER, smp=smp, max_epochs=1, use_distributed_sampler=False, plugins=plugin)
    trainer.fit(module)
    trainer.save_checkpoint(folder / "end.ckpt")
    return torch.load(folder / "end.ckpt", weights_only=False)


def test_losses_are_scaled_under_either_package_of_lightning(tmp_path):
    with quiet():
        expected = in_the_older_tree(tmp_path / "one", None)
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1}
    assert_same(on_ranks(in_the_older_tree, 2, tmp_path / "smp", smp)[0], expected)


def test_the_options_of_the_strategy_count(tmp_path):
    smp = {
        "pipeline_parallel_degree": 2,
        "microbatches": 1,
        "init_scale": 2.0**23,
        "scale_factor": 4.0,
        "delayed_shift": 2,
        "scale_window": 100,
    }
    saved = on(2, tmp_path, smp, "16-mixed")["MixedPrecision"]
    assert saved["growth_interval"] == 100
    assert math.log(saved["scale"] / 2.0**23, 4) < 0
    assert saved["hysteresis"] == 1


# Options of the strategy that ask for half precision


@pytest.mark.dear
@pytest.mark.parametrize("name", ["fp16", "fp16_params"])
def test_units_in_float16_have_scaled_losses_whatever_the_layout(name, tmp_path):
    options = {name: True, "microbatches": 2, "init_scale": 2.0**23, "scale_window": 2}
    expected = on(1, tmp_path / "one", {"pipeline_parallel_degree": 1, **options}, "32-true", gradient_clip_val=0.5)
    steps = expected["optimizer_states"][0]["state"][0]["step"].item()
    assert 0 < steps < STEPS
    for pp in (2, 4):
        smp = {"pipeline_parallel_degree": pp, **options}
        assert_same(on(pp, tmp_path / f"{pp}", smp, "32-true", gradient_clip_val=0.5), expected)


def test_plain_lightning_goes_on_with_the_scale_of_units_in_float16(tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1, "fp16": True}
    scaler = {"init_scale": 2.0**23, "growth_interval": 1000}
    options = {"init_scale": 2.0**23, "scale_window": 1000}
    for first, second in ((smp, None), (None, smp)):
        folder = tmp_path / ("smp" if first else "plain")
        saved = []
        for number, layout in enumerate((first, second)):
            checkpoint = folder / "0" / "end.ckpt" if number else None
            if layout is None:
                args = folder / f"{number}", "16-mixed", scaler
                saved.append(in_one(*args, epochs=number + 1, checkpoint=checkpoint))
            else:
                args = folder / f"{number}", {**layout, **options}, "32-true"
                saved.append(on(2, *args, epochs=number + 1, checkpoint=checkpoint))
        before, after = (each["MixedPrecision"] for each in saved)
        assert before["scale"] < 2.0**23
        assert after["scale"] <= before["scale"]
        assert after["_growth_tracker"] == before["_growth_tracker"] + STEPS


# Refusals


class Strange(torch.amp.GradScaler):
    pass


@pytest.mark.parametrize(
    ("smp", "options", "match"),
    [
        ({"loss_scale": 8.0}, {"precision": "bf16-mixed"}, "`loss_scale=8.0` has no effect"),
        ({"scale_window": 5}, {"precision": "32-true"}, "`scale_window=5` has no effect"),
        ({"scale_window": 5}, {"precision": "16-true"}, "Set `loss_scale=dynamic` as well"),
        (
            {"loss_scale": 8.0},
            {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))},
            "contradict the scaler of the precision plugin",
        ),
        ({}, {"plugins": MixedPrecision("16-mixed", "cpu", Strange("cpu"))}, "a scaler of the class Strange"),
        ({"fp16": True}, {"precision": "16-true"}, "`fp16=True` contradicts `precision='16-true'`"),
        ({"bf16": True}, {"precision": "bf16-mixed"}, "`bf16=True` contradicts `precision='bf16-mixed'`"),
        ({"fp16_params": True}, {"precision": "64-true"}, "`fp16_params=True` contradicts `precision='64-true'`"),
    ],
)
def test_scales_without_effect_are_refused(smp, options, match, tmp_path):
    trainer = toy_trainer(tmp_path, smp={"microbatches": 1, **smp}, **options)
    with quiet(), pytest.raises(ConfigError, match=match):
        refuse_unsupported(trainer, toy_module(), [], spreads=False)


def test_a_scaler_that_is_switched_off_scales_nothing(tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1}
    expected = in_one(tmp_path / "one", "16-mixed", {"enabled": False})
    assert_same(on(2, tmp_path / "smp", smp, "16-mixed", {"enabled": False}), expected)
