"""Metric objects aggregate what one process aggregates, on every rank."""

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


def test_replicas_count_each_sample_once(tmp_path):
    with quiet():
        expected, _, _ = fit(tmp_path, None)
    for metrics, _, _ in on_ranks(fit, 4, tmp_path, {"pipeline_parallel_degree": 2, "microbatches": 2}):
        assert metrics["count"] == expected["count"] == 48
        assert metrics["sum of labels"] == expected["sum of labels"]
