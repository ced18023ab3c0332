"""What steps return and log, over data of every kind, is what one process returns and logs."""

from importlib import import_module

import pytest
import torch
from lightning_toy import (
    CLASSES,
    FEATURES,
    NEWER,
    metrics_of,
    on_ranks,
    quiet,
    toy_data,
    toy_loader,
    toy_module,
    toy_trainer,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

callbacks = import_module(f"{NEWER}.callbacks")
combined = import_module(f"{NEWER}.utilities.combined_loader")


def smp(degree, **options):
    return {"pipeline_parallel_degree": degree, "microbatches": 4, **options}


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for mine, plain in zip(found, expected, strict=True):
            assert_same(mine, plain)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4)
    else:
        assert found == expected


def compare(body, pp, folder, *args):
    """``body`` on every rank gives what it gives in one process."""
    with quiet():
        expected = body(folder / "one", None, *args)
    for found in on_ranks(body, pp, folder / "smp", smp(pp), *args):
        assert_same(found, expected)


# Predictions


def tensors(self, batch, batch_idx, dataloader_idx=0):
    return self.net(batch[0])


def dicts(self, batch, batch_idx, dataloader_idx=0):
    logits = self.net(batch[0])
    return {
        "logits": logits,
        "labels": batch[1],
        "best": logits.argmax(-1),
        "names": [f"{x}" for x in batch[1].tolist()],
    }


def lists(self, batch, batch_idx, dataloader_idx=0):
    logits = self.net(batch[0])
    return [logits, (logits.softmax(-1), batch_idx)]


def no_tensors(self, batch, batch_idx, dataloader_idx=0):
    return self.net(batch[0]).argmax(-1).tolist()


def nothing(self, batch, batch_idx, dataloader_idx=0):
    self.net(batch[0])


def predict(folder, smp_options, step):
    module = toy_module(predict_step=step)
    trainer = toy_trainer(folder, smp=smp_options)
    loaders = [toy_loader(shuffle=False, batch_size=20), toy_loader(shuffle=False, batch_size=9)]
    single = trainer.predict(module, loaders[0])
    several = trainer.predict(module, loaders)
    silent = trainer.predict(module, loaders[0], return_predictions=False)
    return single, several, silent


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("step", [tensors, dicts, lists, no_tensors, nothing])
def test_predictions(step, pp, tmp_path):
    compare(predict, pp, tmp_path, step)


class Writer(callbacks.BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.written = []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
        self.written.append((prediction.clone(), indices, batch_idx))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.written.append((list(predictions), indices))


def write(folder, smp_options):
    writer = Writer()
    toy_trainer(folder, smp=smp_options, callbacks=[writer]).predict(
        toy_module(), toy_loader(shuffle=False, batch_size=20), return_predictions=False
    )
    return writer.written


def test_prediction_writers(tmp_path):
    compare(write, 2, tmp_path)


# Outputs in hooks


def step_with_outputs(self, batch, batch_idx):
    logits = self.net(batch[0])
    return {"loss": nn.functional.cross_entropy(logits, batch[1]), "logits": logits.detach(), "batch_idx": batch_idx}


def outputs_in_hooks(folder, smp_options):
    seen = []

    def note(self, outputs, batch, batch_idx, dataloader_idx=0):
        seen.append({name: v.detach().clone() if isinstance(v, torch.Tensor) else v for name, v in outputs.items()})

    class Watch(callbacks.Callback):
        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
            note(module, outputs, batch, batch_idx)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            note(module, outputs, batch, batch_idx)

    module = toy_module(
        training_step=step_with_outputs,
        validation_step=step_with_outputs,
        on_validation_batch_end=note,
        on_train_batch_end=note,
    )
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1, callbacks=[Watch()])
    trainer.fit(module, toy_loader(shuffle=False, batch_size=10), toy_loader(shuffle=False, batch_size=20))
    return seen


@pytest.mark.parametrize("pp", [2, 4])
def test_hooks_get_the_outputs_of_the_whole_batch(pp, tmp_path):
    compare(outputs_in_hooks, pp, tmp_path)


# Data


class Stream(IterableDataset):
    def __init__(self, length, with_length):
        self.length = length
        if with_length:
            self.__class__ = SizedStream

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for number in range(self.length):
            yield torch.randn(FEATURES, generator=generator), number % CLASSES


class SizedStream(Stream):
    def __len__(self):
        return self.length


def stream(folder, smp_options, with_length):
    module = toy_module()
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=2, limit_val_batches=3 if not with_length else 1.0)
    trainer.fit(
        module, DataLoader(Stream(27, with_length), batch_size=8), DataLoader(Stream(19, with_length), batch_size=8)
    )
    return metrics_of(trainer), module.state_dict()


@pytest.mark.parametrize("with_length", [True, False])
def test_iterable_datasets(with_length, tmp_path):
    compare(stream, 2, tmp_path, with_length)


def combined_step(self, batch, batch_idx, dataloader_idx=0):
    if isinstance(batch, dict):
        losses = {name: self.loss(part) for name, part in batch.items() if part is not None}
        self.log_dict(losses, on_step=False, on_epoch=True, batch_size=8)
        return sum(losses.values())
    loss = self.loss(batch)
    self.log("val", loss)
    return loss


def combine(folder, smp_options, mode):
    loaders = {"a": toy_loader(shuffle=False), "b": toy_loader(shuffle=False, dataset=toy_data(32))}
    module = toy_module(
        training_step=combined_step, validation_step=combined_step, on_train_batch_start=lambda self, batch, idx: None
    )
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1)
    several = [toy_loader(shuffle=False), toy_loader(shuffle=False, batch_size=12)]
    trainer.fit(module, combined.CombinedLoader(loaders, mode), several)
    return metrics_of(trainer), module.state_dict()


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_combined_and_several_loaders(mode, tmp_path):
    compare(combine, 2, tmp_path, mode)


LIMITS = {
    "numbers": {"limit_train_batches": 3, "limit_val_batches": 2},
    "fractions": {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
    "validation within the epoch": {"val_check_interval": 0.5},
    "every second epoch": {"check_val_every_n_epoch": 2},
    "overfitting": {"overfit_batches": 2},
    "one batch": {"fast_dev_run": True},
    "no validation": {"limit_val_batches": 0},
    "steps": {"max_steps": 7, "max_epochs": -1},
    "sanity check": {"num_sanity_val_steps": -1},
    "anomaly detection": {"detect_anomaly": True},
    "without inference mode": {"inference_mode": False},
}


def limited(folder, smp_options, name):
    module = toy_module()
    trainer = toy_trainer(folder, smp=smp_options, **LIMITS[name])
    trainer.fit(module, toy_loader(shuffle=False, batch_size=10), toy_loader(shuffle=False, batch_size=10))
    return metrics_of(trainer), trainer.global_step, module.state_dict()


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name, tmp_path):
    compare(limited, 2, tmp_path, name)


# Metrics


def measured_step(self, batch, batch_idx):
    logits = self.net(batch[0])
    loss = nn.functional.cross_entropy(logits, batch[1])
    self.train_metrics(logits, batch[1])
    self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
    self.mean(loss)
    self.log("mean", self.mean, on_step=False, on_epoch=True)
    self.log_dict(
        {"loss": loss, "loss2": 2 * loss}, sync_dist=True, on_step=False, on_epoch=True, batch_size=len(batch[0])
    )
    self.log("constant", 3.0, sync_dist=True)
    self.log("total", loss * len(batch[0]), reduce_fx="sum", on_step=False, on_epoch=True)
    return loss


def measured_validation(self, batch, batch_idx):
    logits = self.net(batch[0])
    self.val_metrics.update(logits, batch[1])
    self.log_dict(self.val_metrics, on_epoch=True)
    self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]), sync_dist=True)


def measure(folder, smp_options):
    module = toy_module(training_step=measured_step, validation_step=measured_validation)
    metrics = MetricCollection([MulticlassAccuracy(CLASSES, average="micro"), MulticlassF1Score(CLASSES)])
    module.train_metrics, module.val_metrics = metrics.clone(prefix="train/"), metrics.clone(prefix="val/")
    module.mean = MeanMetric()
    trainer = toy_trainer(folder, smp=smp_options)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False, batch_size=20))
    found = metrics_of(trainer)
    found.pop("total")  # a sum over batches of what microbatches average
    return found


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
def test_collections_of_metrics_and_synchronised_values(pp, tmp_path):
    compare(measure, pp, tmp_path)


# Several models in one module


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x):
        return self.layers(x)


def autoencode(self, batch, batch_idx):
    code = self.encoder(batch[0])
    return nn.functional.mse_loss(self.decoder(code), batch[0]) + nn.functional.cross_entropy(self.net(code), batch[1])


def several_models(folder, smp_options):
    torch.manual_seed(1)
    module = toy_module(training_step=autoencode)
    module.validation_step = None
    module.encoder, module.decoder, module.net = Encoder(), nn.Linear(16, FEATURES), nn.Linear(16, CLASSES)
    trainer = toy_trainer(folder, smp=smp_options)
    trainer.fit(module, toy_loader(shuffle=False))
    return module.state_dict()


@pytest.mark.parametrize("pp", [2, 4])
def test_several_models_in_one_module(pp, tmp_path):
    compare(several_models, pp, tmp_path)


# Modes


def partly_without_gradient(self, batch, batch_idx):
    with torch.no_grad():
        target = self.net(batch[0]).softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = self.net(batch[0])
    with torch.inference_mode():
        scale = self.net(batch[0]).abs().mean()
    self.log("scale", scale)
    return (
        nn.functional.cross_entropy(self.net(batch[0]), target + nn.functional.one_hot(batch[1], 4))
        + low.float().mean()
    )


def validation_with_gradient(self, batch, batch_idx):
    with torch.inference_mode():
        self.log("inference", self.loss(batch))
    with torch.enable_grad():
        self.log("grad", self.loss(batch))


def modes(folder, smp_options):
    module = toy_module(training_step=partly_without_gradient, validation_step=validation_with_gradient)
    trainer = toy_trainer(folder, smp=smp_options, inference_mode=False)
    before = trainer.validate(module, toy_loader(shuffle=False), verbose=False)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
    found = metrics_of(trainer)
    return [sorted(result) for result in before], before[0]["grad"], found


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
def test_modes_inside_of_steps(pp, tmp_path):
    with quiet():
        expected = modes(tmp_path / "one", None)
    for found in on_ranks(modes, pp, tmp_path / "smp", smp(pp)):
        assert found[:1] == expected[:1]
        assert found[1] == pytest.approx(expected[1], rel=1e-4)
        assert found[2] == pytest.approx(expected[2], rel=2e-2)  # bfloat16 per microbatch


def validate_first(folder, smp_options):
    module = toy_module()
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=1)
    before = trainer.validate(module, toy_loader(shuffle=False), verbose=False)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
    return before, metrics_of(trainer), module.state_dict()


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
def test_validation_may_come_before_training(pp, tmp_path):
    compare(validate_first, pp, tmp_path)


# Replicas


def predict_on_replicas(folder, smp_options):
    trainer = toy_trainer(folder, smp=smp_options)
    return torch.cat(trainer.predict(toy_module(), toy_loader(shuffle=False))), trainer.strategy.mesh.dp_rank


def test_each_replica_predicts_its_own_samples(tmp_path):
    """As with Lightning's own data-parallel strategies, nothing is gathered from replicas."""
    with quiet():
        whole = torch.cat(toy_trainer(tmp_path).predict(toy_module(), toy_loader(shuffle=False)))
    found = on_ranks(predict_on_replicas, 4, tmp_path, smp(2))
    for outputs, replica in found:
        torch.testing.assert_close(outputs, whole[replica::2], rtol=1e-5, atol=1e-6)
