"""Modules that are built on the meta device, by `configure_model` or by the user, train as any other."""

import copy
import importlib

import pytest
import torch
from lightning_toy import CLASSES, FEATURES, NEWER, OLDER, metrics_of, on_ranks, toy_loader, toy_module, toy_trainer
from torch import nn


def configure_model(self):
    if not hasattr(self, "built_on"):
        layers = (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(4))
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), *layers, nn.Linear(16, CLASSES))
        self.built_on = str(self.net[0].weight.device)


def smp(pp, **options):
    return {"pipeline_parallel_degree": pp, "microbatches": 2, "delayed_parameter_initialization": True, **options}


def fit(folder, root, options, *, ckpt_path=None, **trainer_options):
    module = toy_module(root, configure_model=configure_model)
    begun = {}

    def on_train_batch_end(*args):
        begun.setdefault("device", str(module.device))

    module.on_train_batch_end = on_train_batch_end
    trainer = toy_trainer(folder, root, smp=options, **trainer_options)
    # Layers that draw nothing leave other numbers to a sampler than layers that do.
    data = toy_loader(shuffle=False)
    trainer.fit(module, data, data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "end.ckpt")
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return metrics_of(trainer), module.built_on, begun["device"], rates


def weights_of(folder):
    return torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]


def assert_same_weights(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name, **tolerance)


@pytest.mark.parametrize("root", [NEWER, OLDER])
def test_configure_model_builds_on_the_meta_device_and_all_layouts_begin_alike(root, tmp_path):
    [expected] = on_ranks(fit, 1, tmp_path / "1", root, smp(1))
    assert expected[1:3] == ("meta", "cpu")
    for found in on_ranks(fit, 2, tmp_path / "2", root, smp(2)):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1:] == expected[1:]
    assert_same_weights(weights_of(tmp_path / "2"), weights_of(tmp_path / "1"), rtol=0, atol=0)


def test_shard_groups_begin_with_the_values_of_one_rank(tmp_path):
    on_ranks(begin, 1, tmp_path / "1", smp(1))
    on_ranks(begin, 2, tmp_path / "2", smp(1, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=0))
    assert_same_weights(weights_of(tmp_path / "2"), weights_of(tmp_path / "1"), rtol=0, atol=0)


def begin(folder, options):
    module = toy_module(configure_model=configure_model)
    trainer = toy_trainer(folder, smp=options)
    trainer.validate(module, toy_loader(shuffle=False), verbose=False)
    trainer.save_checkpoint(folder / "end.ckpt")


def test_without_the_option_configure_model_builds_as_in_one_process(tmp_path):
    for found in on_ranks(fit, 2, tmp_path, NEWER, smp(2, delayed_parameter_initialization=False)):
        assert found[1] == "cpu"


def resume(folder, options):
    fit(folder / "first", NEWER, options, max_epochs=1)
    return fit(folder / "second", NEWER, options, ckpt_path=folder / "first" / "end.ckpt", max_epochs=2)


@pytest.mark.dear
def test_a_checkpoint_reaches_weights_and_optimizers_that_have_no_memory_yet(tmp_path):
    without = smp(2, delayed_parameter_initialization=False)
    expected = on_ranks(resume, 2, tmp_path / "built", without)
    # Both go on from the same file, one with memory and one without.
    for options, place in ((smp(2), "delayed"), (without, "ordinary")):
        checkpoint = tmp_path / "built" / "first" / "end.ckpt"
        found = on_ranks(fit_on, 2, tmp_path / place, options, checkpoint)
        assert [each[0] for each in found] == [pytest.approx(each[0], rel=1e-6) for each in expected]
        assert [each[3] for each in found] == [each[3] for each in expected]
        assert_same_weights(weights_of(tmp_path / place), weights_of(tmp_path / "built" / "second"), rtol=0, atol=0)


def fit_on(folder, options, checkpoint):
    return fit(folder, NEWER, options, ckpt_path=checkpoint, max_epochs=2)


EVALUATED = {
    "pp2": {"pipeline_parallel_degree": 2},
    "sdp2": {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
    "tp2": {"tensor_parallel_degree": 2, "tensor_parallel": {"net.1.0": "column"}},
}


def evaluate_after_training(folder, layout):
    spread, norms = [], []

    def on_start(self):
        spread.append(self.trainer.strategy.engine.is_spread)
        norms.append(self.net[0].weight.norm().item())

    hooks = {f"on_{name}_start": on_start for name in ("test", "predict")}
    module = toy_module(configure_model=configure_model, **hooks)
    options = {"microbatches": 2, "delayed_parameter_initialization": True, **layout}
    # Replicas see the same samples, so that one process does as well.
    trainer = toy_trainer(folder, smp=options, max_epochs=1, use_distributed_sampler=False)
    data = toy_loader(shuffle=False)
    trainer.fit(module, data, data)
    trainer.save_checkpoint(folder / "one.ckpt")
    found = [trainer.test(module, data, verbose=False)]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, data)  # a second training run begins with the whole module
    found += trainer.test(module, data, verbose=False)
    found += trainer.validate(module, data, verbose=False, ckpt_path=folder / "one.ckpt")
    found.append(torch.cat(trainer.predict(module, data)))
    trainer.save_checkpoint(folder / "end.ckpt")
    return found, norms, spread


@pytest.mark.dear
@pytest.mark.parametrize("layout", EVALUATED)
def test_evaluation_after_training_uses_the_parts_that_ranks_have(layout, tmp_path):
    [(expected, norms, _)] = on_ranks(evaluate_after_training, 1, tmp_path / "1", {})
    for found, their_norms, spread in on_ranks(evaluate_after_training, 2, tmp_path / "2", EVALUATED[layout]):
        assert spread == [True] * 3
        assert their_norms == pytest.approx(norms, rel=1e-4)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert_same_weights(weights_of(tmp_path / "2"), weights_of(tmp_path / "1"), rtol=1e-3, atol=1e-4)


def fit_what_was_built_on_meta(folder, options):
    with torch.device("meta"):
        module = toy_module()
    trainer = toy_trainer(folder, smp=options, max_epochs=1)
    trainer.fit(module, toy_loader(), toy_loader(shuffle=False))
    return metrics_of(trainer), str(module.device), {str(parameter.device) for parameter in module.parameters()}


def test_a_module_that_was_built_on_the_meta_device_is_trained(tmp_path):
    [expected] = on_ranks(fit_what_was_built_on_meta, 1, tmp_path, smp(1))
    assert expected[1:] == ("cpu", {"cpu"})
    for found in on_ranks(fit_what_was_built_on_meta, 2, tmp_path, smp(2)):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found[1:] == expected[1:]


def message_of(folder, options, overrides):
    with torch.device("meta"):
        module = toy_module(**overrides)
    try:
        toy_trainer(folder, smp=options, max_epochs=1).fit(module, toy_loader())
    except Exception as error:
        return str(error)
    return "not refused"


def test_without_the_option_a_module_on_the_meta_device_is_refused(tmp_path):
    for message in on_ranks(message_of, 2, tmp_path, smp(2, delayed_parameter_initialization=False), {}):
        assert "`net.0.weight` is on the meta device and has no values. Set `delayed_parameter" in message


def save_early(self):
    self.trainer.save_checkpoint("early.ckpt")


def test_a_checkpoint_before_there_are_values_is_refused(tmp_path):
    for message in on_ranks(message_of, 2, tmp_path, smp(2), {"on_fit_start": save_early}):
        assert "to be saved before its first step" in message


def averaged(folder, options):
    class Average(importlib.import_module(NEWER).Callback):
        def setup(self, trainer, pl_module, stage):
            self.average = copy.deepcopy(pl_module)

        @torch.no_grad()
        def on_train_batch_end(self, trainer, pl_module, *others):
            for mine, theirs in zip(self.average.parameters(), pl_module.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)

    with torch.device("meta"):
        module = toy_module()
    callback = Average()
    toy_trainer(folder, smp=options, max_epochs=1, callbacks=[callback]).fit(module, toy_loader())
    return {name: tensor.detach().clone() for name, tensor in callback.average.named_parameters()}


def test_copies_that_callbacks_make_begin_with_the_same_values(tmp_path):
    [expected] = on_ranks(averaged, 1, tmp_path, smp(1))
    assert not any(tensor.is_meta or tensor.isnan().any() for tensor in expected.values())
    for found in on_ranks(averaged, 2, tmp_path, smp(2, restore_module="all")):
        assert_same_weights(found, expected, rtol=1e-6, atol=1e-6)


SPLIT = {"tensor_parallel_degree": 2, "tensor_parallel": {"net.*.0": "column"}}


def test_layers_that_are_split_begin_with_the_values_of_one_rank(tmp_path):
    on_ranks(begin, 1, tmp_path / "1", smp(1))
    on_ranks(begin, 2, tmp_path / "2", smp(1, **SPLIT))
    assert_same_weights(weights_of(tmp_path / "2"), weights_of(tmp_path / "1"), rtol=0, atol=0)


@pytest.mark.dear
def test_a_run_with_split_layers_goes_on_from_its_checkpoint_as_one_rank_does(tmp_path):
    [expected] = on_ranks(resume, 1, tmp_path / "1", smp(1))
    for found in on_ranks(resume, 2, tmp_path / "2", smp(1, **SPLIT)):
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        assert found[1:] == expected[1:]


def after_a_run(folder, options):
    with torch.device("meta"):
        module = toy_module()
    trainer = toy_trainer(folder, smp=options, max_epochs=1)
    trainer.fit(module, toy_loader())
    trainer.save_checkpoint(folder / "end.ckpt")
    try:
        return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    except RuntimeError as error:
        return str(error)


def test_the_module_is_left_as_it_is_at_the_end_unless_somebody_asks(tmp_path):
    for found in on_ranks(after_a_run, 2, tmp_path / "unset", smp(2)):
        for remedy in ("trainer.save_checkpoint", '`restore_module="all"`'):
            assert remedy in found
    first, second = on_ranks(after_a_run, 2, tmp_path / "first", smp(2, restore_module="rank_zero"))
    assert isinstance(second, str)
    for found in (first, *on_ranks(after_a_run, 2, tmp_path / "all", smp(2, restore_module="all"))):
        for name, value in weights_of(tmp_path / "unset").items():
            assert torch.equal(found[name], value)
