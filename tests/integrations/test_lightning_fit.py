"""The whole life of a Trainer gives what one plain process gives, and gives it on every rank."""

from importlib import import_module

import pytest
import torch
from lightning_toy import NEWER, OLDER, metrics_of, on_ranks, quiet, toy_loader, toy_module, toy_trainer

FIT_VARIANTS = {
    "plain": {},
    "accumulation with an uneven last window": {"accumulate_grad_batches": 4},
    "clipping by norm": {"gradient_clip_val": 0.01},
    "clipping by value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "accumulation and clipping": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01},
    "validation inside the epoch": {"val_check_interval": 2},
    "double precision": {"precision": "64-true"},
}
SMP = {"pipeline_parallel_degree": 2, "microbatches": 4}


def fit(folder, root, smp, options):
    module = toy_module(root)
    trainer = toy_trainer(folder, root, smp=smp, enable_checkpointing=True, **options)
    trainer.fit(module, toy_loader(), toy_loader(shuffle=False))
    weights = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    return metrics_of(trainer), module.seen, trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"], weights


def assert_same_run(found, expected, *, rtol=1e-5):
    assert found[0] == pytest.approx(expected[0], rel=rtol)
    assert found[1:4] == expected[1:4]
    for name, value in expected[4].items():
        torch.testing.assert_close(found[4][name], value, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("variant", FIT_VARIANTS)
def test_fit_is_that_of_one_process(variant, tmp_path):
    with quiet():
        expected = fit(tmp_path / "one", NEWER, None, FIT_VARIANTS[variant])
    for found in on_ranks(fit, 2, tmp_path / "two", NEWER, SMP, FIT_VARIANTS[variant]):
        assert_same_run(found, expected)


def test_fit_in_the_other_tree(tmp_path):
    with quiet():
        expected = fit(tmp_path / "one", OLDER, None, {"gradient_clip_val": 0.01})
    for found in on_ranks(fit, 2, tmp_path / "two", OLDER, SMP, {"gradient_clip_val": 0.01}):
        assert_same_run(found, expected)


def test_bf16_autocast_is_close_to_one_process(tmp_path):
    with quiet():
        expected = fit(tmp_path / "one", NEWER, None, {"precision": "bf16-mixed"})
    for found in on_ranks(fit, 2, tmp_path / "two", NEWER, SMP, {"precision": "bf16-mixed"}):
        assert found[0] == pytest.approx(expected[0], rel=2e-2)
        assert all(value.dtype == torch.float32 for value in found[4].values())


def fit_in_true_bf16(folder):
    fit(folder, NEWER, SMP, {"precision": "bf16-true"})
    return torch.get_default_dtype()


def test_true_precision_leaves_the_default_dtype_alone(tmp_path):
    assert on_ranks(fit_in_true_bf16, 2, tmp_path) == [torch.float32] * 2


def life(folder, smp):
    module = toy_module()
    trainer = toy_trainer(folder, smp=smp, max_epochs=1)
    trainer.fit(module, toy_loader(batch_size=10), toy_loader(shuffle=False))  # 48 samples: the last batch has 8
    validated = trainer.validate(module, toy_loader(shuffle=False), verbose=False)
    tested = trainer.test(module, toy_loader(shuffle=False), verbose=False)
    predicted = trainer.predict(module, toy_loader(shuffle=False, batch_size=20))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, toy_loader(), toy_loader(shuffle=False))
    return validated, tested, [tuple(part.shape) for part in predicted], torch.cat(predicted), metrics_of(trainer)


def test_one_trainer_fits_validates_tests_predicts_and_fits_again(tmp_path):
    with quiet():
        expected = life(tmp_path, None)
    for found in on_ranks(life, 2, tmp_path, SMP):
        for mine, plain in zip(found[:2], expected[:2], strict=True):
            assert mine[0] == pytest.approx(plain[0], rel=1e-5)
        assert found[2] == expected[2]
        torch.testing.assert_close(found[3], expected[3], rtol=1e-4, atol=1e-6)
        assert found[4] == pytest.approx(expected[4], rel=1e-4)


def record_hooks(folder, smp):
    calls = []
    names = (
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
    )
    base = import_module(NEWER).LightningModule

    def recorder(name):
        def hook(self, *args, **kwargs):
            calls.append((name, any(parameter.grad is not None for parameter in self.parameters())))
            return getattr(base, name)(self, *args, **kwargs)

        return hook

    module = toy_module(**{name: recorder(name) for name in names})
    trainer = toy_trainer(folder, smp=smp, max_steps=2, accumulate_grad_batches=2)
    trainer.fit(module, toy_loader())
    return calls


def test_every_hook_is_called_in_lightnings_order_with_gradients_in_place(tmp_path):
    with quiet():
        expected = record_hooks(tmp_path, None)
    assert on_ranks(record_hooks, 2, tmp_path, SMP) == [expected] * 2


def scaled_backward(self, loss):
    (3.0 * loss).backward()


def fit_with_own_backward(folder, smp):
    module = toy_module(
        backward=scaled_backward, configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.1)
    )
    trainer = toy_trainer(folder, smp=smp, max_epochs=1)
    trainer.fit(module, toy_loader(), toy_loader(shuffle=False))
    return metrics_of(trainer)


def test_a_users_own_backward_scales_the_gradients(tmp_path):
    with quiet():
        expected = fit_with_own_backward(tmp_path, None)
    for found in on_ranks(fit_with_own_backward, 2, tmp_path, SMP):
        assert found == pytest.approx(expected, rel=1e-5)


def step_with_dict(self, batch, batch_idx):
    logits = self.net(batch[0])
    return {"loss": torch.nn.functional.cross_entropy(logits, batch[1]), "logits": logits.detach(), "note": "kept"}


def dict_outputs(folder, smp):
    found = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        found.append((float(outputs["loss"]), outputs["logits"], outputs["note"]))

    module = toy_module(training_step=step_with_dict, on_train_batch_end=on_train_batch_end)
    toy_trainer(folder, smp=smp, max_steps=1).fit(module, toy_loader())
    return found[0]


def test_a_step_may_return_a_dict(tmp_path):
    with quiet():
        loss, logits, note = dict_outputs(tmp_path, None)
    for found in on_ranks(dict_outputs, 2, tmp_path, SMP):
        assert found[0] == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(found[1], logits)
        assert found[2] == note


def stop_early(folder, smp):
    callbacks = import_module(f"{NEWER}.callbacks")
    best = callbacks.ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=1)
    stop = callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=0.05)
    trainer = toy_trainer(folder, smp=smp, max_epochs=20, enable_checkpointing=True, callbacks=[best, stop])
    trainer.fit(toy_module(), toy_loader(), toy_loader(shuffle=False))
    return trainer.current_epoch, stop.stopped_epoch, float(best.best_model_score)


def test_monitors_decide_alike_on_every_rank(tmp_path):
    with quiet():
        expected = stop_early(tmp_path / "one", None)
    assert expected[1] > 0
    for found in on_ranks(stop_early, 2, tmp_path / "two", SMP):
        assert found == pytest.approx(expected, rel=1e-4)


def two_trainers(folder, smp, later):
    module = toy_module()
    toy_trainer(folder, smp=smp, max_epochs=1, enable_checkpointing=True).fit(module, toy_loader())
    [tested] = toy_trainer(folder, smp=later).test(module, toy_loader(shuffle=False), verbose=False)
    return tested


def test_a_second_trainer_goes_on_with_the_module(tmp_path):
    with quiet():
        expected = two_trainers(tmp_path / "one", None, None)
    for found in on_ranks(two_trainers, 2, tmp_path / "two", SMP, SMP):
        assert found == pytest.approx(expected, rel=1e-5)


def fit_with_gradient_hooks(folder, smp):
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities import grad_norm

    class LogNorms(Callback):
        def on_after_backward(self, trainer, pl_module):
            for name, parameter in pl_module.named_parameters():
                pl_module.log(f"after/{name}", parameter.grad.abs().max())

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, norm_type=2))
        norms = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
        if max(norm.item() for norm in norms) > 0.5:  # a branch on gradients of all stages
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)
        first, last = list(self.parameters())[0], list(self.parameters())[-1]
        last.grad.add_(first.grad.sum())  # from one stage to another

    module = toy_module(on_before_optimizer_step=on_before_optimizer_step)
    trainer = toy_trainer(folder, smp=smp, callbacks=[LogNorms()])
    trainer.fit(module, toy_loader())
    trainer.save_checkpoint(folder / "end.ckpt")
    return metrics_of(trainer), torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
def test_hooks_see_log_and_change_the_gradients_of_all_stages(pp, tmp_path):
    with quiet():
        expected_metrics, expected = fit_with_gradient_hooks(tmp_path / "one", None)
    smp = {"pipeline_parallel_degree": pp, "microbatches": 4}
    for metrics, weights in on_ranks(fit_with_gradient_hooks, pp, tmp_path / "smp", smp):
        assert len(metrics) > 10
        assert metrics == pytest.approx(expected_metrics, rel=1e-4)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
