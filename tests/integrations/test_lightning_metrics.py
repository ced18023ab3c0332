"""Metric objects aggregate what one process aggregates, on every rank."""

import copy
import pickle

import pytest
import torch
from lightning_toy import CLASSES, metrics_of, on_ranks, quiet, toy_loader, toy_module, toy_trainer
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


def training_step(self, batch, batch_idx):
    logits = self.net(batch[0])
    loss = torch.nn.functional.cross_entropy(logits, batch[1])
    self.accuracy(logits, batch[1])
    self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
    self.seen_losses.update(loss)
    return loss


def on_train_epoch_end(self):
    self.log("loss by hand", self.seen_losses.compute())
    self.seen_losses.reset()


def validation_step(self, batch, batch_idx):
    logits = self.net(batch[0])
    self.collection.update(logits, batch[1])
    self.count.update(torch.ones(len(batch[0])))
    self.labels.update(batch[1].float())
    self.best(logits.argmax(-1) == batch[1])
    self.log("best", self.best)


def on_validation_epoch_end(self):
    self.log_dict(self.collection.compute())
    self.log("count", self.count.compute())
    self.log("sum of labels", self.labels.compute().sum())
    for metric in (self.collection, self.count, self.labels):
        metric.reset()


def fit(folder, smp):
    module = toy_module(
        training_step=training_step,
        on_train_epoch_end=on_train_epoch_end,
        validation_step=validation_step,
        on_validation_epoch_end=on_validation_epoch_end,
    )
    module.accuracy = MulticlassAccuracy(CLASSES, average="micro")
    module.seen_losses = MeanMetric()
    module.collection = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)])
    module.count, module.labels, module.best = SumMetric(), CatMetric(), MeanMetric()
    trainer = toy_trainer(folder, smp=smp, max_epochs=2)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
    return metrics_of(trainer), "forward" in vars(module.accuracy), module.count.process_group is None


@pytest.mark.parametrize("pp", [2, 4])
def test_metrics_in_steps_are_those_of_one_process(pp, tmp_path):
    with quiet():
        expected, _, _ = fit(tmp_path, None)
    for metrics, still_replaced, is_plain in on_ranks(
        fit, pp, tmp_path, {"pipeline_parallel_degree": pp, "microbatches": 4}
    ):
        assert metrics == pytest.approx(expected, rel=1e-5)
        assert not still_replaced
        assert is_plain


@pytest.mark.dear
def test_replicas_count_each_sample_once(tmp_path):
    with quiet():
        expected, _, _ = fit(tmp_path, None)
    for metrics, _, _ in on_ranks(fit, 4, tmp_path, {"pipeline_parallel_degree": 2, "microbatches": 2}):
        assert metrics["count"] == expected["count"] == 48
        assert metrics["sum of labels"] == expected["sum of labels"]


class Counting(torch.nn.Linear):
    """A unit with a metric."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.largest = CatMetric()

    def forward(self, values):
        found = super().forward(values)
        self.largest.update(found.detach().amax(1))
        return found


def count_samples(self, batch, batch_idx):
    self.labels.update(batch[1].float())
    return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def fit_and_compute(folder, smp):
    module = toy_module(training_step=count_samples, configure_optimizers=lambda self: None)
    module.labels = CatMetric()
    module.net[-1] = Counting(module.net[-1].in_features, module.net[-1].out_features)
    found = []
    for _ in range(2):
        trainer = toy_trainer(folder, smp=smp)
        trainer.fit(module, toy_loader(shuffle=False))
        found += [metric.compute().sort().values.tolist() for metric in (module.labels, module.net[-1].largest)]
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module.labels))
    assert copies[0].labels.dist_sync_fn is copies[1].dist_sync_fn is None
    return found


@pytest.mark.parametrize(
    ("ranks", "smp"),
    [
        (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
        (4, {"pipeline_parallel_degree": 2, "microbatches": 2}),
        (2, {"tensor_parallel_degree": 2}),
        (2, {"sharded_data_parallel_degree": 2}),
    ],
)
def test_after_a_run_metrics_still_are_those_of_one_process(ranks, smp, tmp_path):
    with quiet():
        expected = fit_and_compute(tmp_path, None)
    assert [len(values) for values in expected] == [96, 96, 192, 192]  # two epochs of 48 samples, twice
    for found in on_ranks(fit_and_compute, ranks, tmp_path, smp):
        assert len(found) == len(expected)
        for values, others in zip(found, expected, strict=True):
            assert values == pytest.approx(others, rel=1e-5)
