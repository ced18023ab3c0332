"""``precision=`` of the Trainer: the checkpoint of plain Lightning, with whatever losses are scaled by."""

import math
from importlib import import_module

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning_toy import OLDER, on_ranks, quiet, toy_data, toy_module, toy_trainer
from torch.utils.data import DataLoader, Subset

from smp_strategy.errors import ConfigError, PeerFailedError, UnsupportedError
from smp_strategy.lightning.refusals import refuse_unsupported

STEPS, BATCH = 8, 8
NO_HOOKS = {"on_train_batch_start": LightningModule.on_train_batch_start}
PRECISIONS = ["32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
# Float16 overflows under it for the first steps, and later again, because it soon grows.
RESTLESS = {"init_scale": 2.0**23, "growth_interval": 2}


def by_step(self):
    optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


def without_scheduler(self):
    return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)


def precision_of(precision, scaler=None):
    if precision != "16-mixed":
        return {"precision": precision}
    # By its name Lightning replaces it on the CPU: "AMP with fp16 is not supported on CPU".
    return {"plugins": MixedPrecision(precision, "cpu", scaler and torch.amp.GradScaler("cpu", **scaler))}


def fit(folder, smp, precision, scaler=None, epochs=1, checkpoint=None, per_replica=False, overrides=None, **options):
    def train_dataloader(self):
        data = toy_data(STEPS * BATCH)
        if not per_replica or getattr(self.trainer.strategy, "mesh", None) is None:
            return DataLoader(data, batch_size=BATCH // options.get("accumulate_grad_batches", 1))
        readers, reader = self.trainer.strategy.distributed_sampler_kwargs.values()
        size = BATCH // readers
        mine = [index for index in range(len(data)) if index // size % readers == reader]
        return DataLoader(Subset(data, mine), batch_size=size)

    methods = {"configure_optimizers": without_scheduler, **NO_HOOKS, **(overrides or {})}
    module = toy_module(train_dataloader=train_dataloader, **methods)
    trainer = toy_trainer(
        folder,
        smp=smp,
        max_epochs=epochs,
        use_distributed_sampler=False,
        **precision_of(precision, scaler),
        **options,
    )
    trainer.fit(module, ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "end.ckpt")
    saved = torch.load(folder / "end.ckpt", weights_only=False)
    return saved, [dict(module.named_parameters())[name].dtype for name in ("net.0.weight", "net.6.bias")]


def in_one(folder, *args, **options):
    with quiet():
        return fit(folder, None, *args, **options)[0]


def fit_with(folder, smp, args, options):
    return fit(folder, smp, *args, **options)


def on(ranks, folder, smp, *args, **options):
    return on_ranks(fit_with, ranks, folder, smp, args, options)[0][0]


def assert_same(found, expected, tolerance=0.0):
    assert found["global_step"] == expected["global_step"]
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(found[key], expected[key], rtol=tolerance, atol=tolerance)
    of_pytorch = [{**each.get("MixedPrecision", {}), "hysteresis": 1} for each in (found, expected)]
    assert of_pytorch[0] == of_pytorch[1]


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


SHARDED = {"sharded_data_parallel_degree": 2}
STAGES = {
    "two stages": (2, {"pipeline_parallel_degree": 2}),
    "four stages": (4, {"pipeline_parallel_degree": 4}),
}
LAYOUTS = {
    "replicas": (2, {"pipeline_parallel_degree": 1}),
    "shards": (2, {"pipeline_parallel_degree": 1, **SHARDED}),
    "shards of stages": (4, {"pipeline_parallel_degree": 2, **SHARDED}),
    "state dealt out": (2, {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}),
    "state of stages dealt out": (4, {"pipeline_parallel_degree": 2, "shard_optimizer_state": True}),
    "split layers": (
        2,
        {
            "pipeline_parallel_degree": 1,
            "tensor_parallel_degree": 2,
            "tensor_parallel": {"net.0": "column", "net.2": "row"},
        },
    ),
}


def by_hand(replicas=1, clip=0.1):
    """One process: divided before gradients are clipped, and schedulers pass over skipped steps."""
    module = toy_module()
    [optimizer], [config] = by_step(module)
    scheduler, scaler = config["scheduler"], torch.amp.GradScaler("cpu", **RESTLESS)
    for inputs, targets in DataLoader(toy_data(STEPS * BATCH), batch_size=BATCH):
        optimizer.zero_grad()
        for part in zip(inputs.chunk(replicas), targets.chunk(replicas), strict=True):
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = module.loss(part)
            scaler.scale(loss).backward()
        for parameter in module.parameters():
            parameter.grad.div_(replicas)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
    return module.state_dict(), scheduler.last_epoch, scaler.get_scale()


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


# Manual optimization


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
        refuse_unsupported(trainer, toy_module(), [])


def test_a_scaler_that_is_switched_off_scales_nothing(tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1}
    expected = in_one(tmp_path / "one", "16-mixed", {"enabled": False})
    assert_same(on(2, tmp_path / "smp", smp, "16-mixed", {"enabled": False}), expected)
