"""What is logged of a metric object per step is its value for all samples of the batch, as in one process."""

import pytest
import torch
from lightning_toy import CLASSES, FEATURES, on_ranks, quiet, toy_data, toy_loader, toy_module, toy_trainer
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, Metric, MetricCollection, MinMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.wrappers import MinMaxMetric

SAMPLES = 46
"""No multiple of the batches: microbatches of different sizes."""
LAYOUTS = {
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "pp2 of 3": (2, {"pipeline_parallel_degree": 2, "microbatches": 3}),
    "pp4": (4, {"pipeline_parallel_degree": 4, "microbatches": 4}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
}


class RunningMean(Metric):
    """A mean that is kept as a mean: states of parts of a batch cannot be added up."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), "mean")
        self.add_state("count", torch.tensor(0.0), "sum")

    def update(self, values) -> None:
        self.mean = (self.mean * self.count + values.sum()) / (self.count + values.numel())
        self.count += values.numel()

    def compute(self):
        return self.mean


class Longest(Metric):
    """Looks at what it has when it is updated: the longest run of ascending values."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("last", torch.tensor(float("-inf")))
        for name in ("run", "longest"):
            self.add_state(name, torch.tensor(0.0))

    def update(self, values) -> None:
        for value in values:
            self.run = self.run + 1 if value >= self.last else torch.tensor(1.0)
            self.longest, self.last = torch.maximum(self.longest, self.run), value

    def compute(self):
        return self.longest


def fit(folder, smp, step, metrics, *, blocks=None, after=None, **options):
    """What is shown after each training batch, and at the end."""
    shown = []

    def on_train_batch_end(self, *args):
        shown.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})
        if after is not None:
            after(self)  # shown after the next batch

    def validation_step(self, batch, batch_idx):
        step(self, self.of_validation, batch, self.net(batch[0]), "val/")

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        step(self, self.of_training, batch, logits, "")
        return nn.functional.cross_entropy(logits, batch[1])

    hooks = {"training_step": training_step, "validation_step": validation_step}
    module = toy_module(on_train_batch_end=on_train_batch_end, **hooks)
    if blocks is not None:
        module.net = blocks()
    module.of_training = nn.ModuleDict({name: make() for name, make in metrics.items()})
    module.of_validation = nn.ModuleDict({name: make() for name, make in metrics.items()})
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, num_sanity_val_steps=0, **options)
    loader = toy_loader(shuffle=False, dataset=toy_data(SAMPLES))
    trainer.fit(module, loader, loader)
    end = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return shown, end


def assert_as_in_one_process(folder, layout, *args, **options):
    with quiet():
        shown, end = fit(folder, None, *args, **options)
    num_ranks, smp = LAYOUTS[layout]
    for found, found_end in on_ranks(fit, num_ranks, folder, smp, *args, **options):
        for each, expected in zip(found, shown, strict=True):
            assert each == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert found_end == pytest.approx(end, rel=1e-4, abs=1e-6)
    assert any("_step" in name for name in shown[0])


BOTH = {"on_step": True, "on_epoch": True}


def log_each(self, metrics, batch, logits, prefix):
    """Metrics whose states are added up, and others, with values of different sizes."""
    metrics["accuracy"](logits, batch[1])
    metrics["auroc"](logits.softmax(1), batch[1])
    metrics["labels"](batch[1].float(), weight=batch[0].abs()[:, 0])
    for name in ("mean", "smallest"):
        metrics[name](logits.detach())
    metrics["longest"](batch[0][:, 0])
    metrics["pearson"](logits[:, 0], batch[0][:, 0])
    for name in metrics:
        # torchmetrics merges a mean of means over steps without weights
        self.log(prefix + name, metrics[name], on_step=True, on_epoch=name != "mean")


EACH = {
    "accuracy": lambda: MulticlassAccuracy(CLASSES, average="micro"),
    "auroc": lambda: MulticlassAUROC(CLASSES),
    "labels": MeanMetric,
    "mean": RunningMean,
    "smallest": MinMetric,
    "longest": Longest,
    "pearson": PearsonCorrCoef,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_of_all_kinds_show_the_whole_batch(layout, tmp_path):
    assert_as_in_one_process(tmp_path, layout, log_each, EACH)


def log_collection(self, metrics, batch, logits, prefix):
    metrics["collection"](logits.softmax(1), batch[1])
    named = {prefix + name: metric for name, metric in metrics["collection"].items()}
    self.log_dict(named if prefix else metrics["collection"], **BOTH)


COLLECTIONS = {
    "collection": lambda: MetricCollection(
        [MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES), MulticlassAUROC(CLASSES)]
    )
}


@pytest.mark.parametrize("layout", ["pp2 of 3", "pp4"])
def test_collections_show_the_whole_batch(layout, tmp_path):
    assert_as_in_one_process(tmp_path, layout, log_collection, COLLECTIONS)


def log_several(self, metrics, batch, logits, prefix):
    """One object, called for several outputs, and logged after each; one that not every microbatch calls."""
    step = {"on_step": True, "on_epoch": False}
    metrics["error"](logits[:, 0], batch[0][:, 0])
    self.log(prefix + "first", metrics["error"], **step)
    metrics["error"](logits[:, 1], batch[0][:, 1])
    metrics["error"](logits[:, 2], batch[0][:, 2])
    self.log(prefix + "last_step", metrics["error"], **step)
    metrics["unlogged"](logits[:, 1].detach())
    metrics["range"](logits[:, 0], batch[0][:, 0])
    chosen = batch[1] > 1
    if chosen.any():
        metrics["some"](logits[chosen].detach())
    self.log(prefix + "some", metrics["some"], **step)


def log_after(self):
    """A hook shows what the step has left: the last call."""
    for name in ("error", "unlogged"):
        self.log(f"{name} after", self.of_training[name], on_step=True, on_epoch=False)
    # Its smallest and largest value are those of microbatches.
    self.log("raw after", self.of_training["range"]._forward_cache["raw"], on_step=True, on_epoch=False)


SEVERAL = {
    "error": MeanSquaredError,
    "some": MeanMetric,
    "unlogged": MeanMetric,
    "range": lambda: MinMaxMetric(MeanSquaredError()),
}


@pytest.mark.parametrize("layout", ["pp2", "pp4"])
def test_several_calls_of_one_metric_are_told_apart(layout, tmp_path):
    assert_as_in_one_process(tmp_path, layout, log_several, SEVERAL, after=log_after)


class Counting(nn.Module):
    """A unit with a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(FEATURES, FEATURES), MeanMetric()

    def forward(self, x):
        self.size(x.abs().mean(1))
        return torch.tanh(self.linear(x))


def log_inside(self, metrics, batch, logits, prefix):
    for number in (0, 2):
        self.log(f"size {number}", self.net[number].size, **BOTH)


def counting_blocks():
    return nn.Sequential(Counting(), Counting(), Counting(), nn.Linear(FEATURES, CLASSES))


@pytest.mark.parametrize("layout", ["pp2", "pp4"])
def test_a_metric_inside_of_a_unit_shows_the_whole_batch_on_every_rank(layout, tmp_path):
    assert_as_in_one_process(tmp_path, layout, log_inside, {}, blocks=counting_blocks, limit_val_batches=0)


def returned_values(folder, smp):
    """What ``forward`` returns in steps, and the samples that a metric has at the end."""
    returned = []

    def training_step(self, batch, batch_idx):
        returned.append(float(self.labels(batch[1].float()).sum()))
        self.kept(self.net(batch[0])[:, 0].detach())
        return self.loss(batch)

    def on_train_epoch_end(self):
        self.end = self.labels.compute(), len(self.kept.compute())

    module = toy_module(training_step=training_step, on_train_epoch_end=on_train_epoch_end)
    module.labels, module.kept = CatMetric(), CatMetric()
    toy_trainer(folder, smp=smp, max_epochs=1, limit_val_batches=0).fit(module, toy_loader(shuffle=False))
    return returned, *module.end


def test_forward_returns_the_value_of_its_microbatch(tmp_path):
    with quiet():
        expected, labels, count = returned_values(tmp_path, None)
    for found, found_labels, found_count in on_ranks(returned_values, 2, tmp_path, LAYOUTS["pp2"][1]):
        assert [sum(found[-12:][i : i + 2]) for i in range(0, 12, 2)] == expected
        assert found_labels.tolist() == labels.tolist()
        assert found_count == count == 48
