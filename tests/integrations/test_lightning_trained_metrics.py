"""Metric objects as the loss, or as a part of it: their gradients are those of one process."""

import pytest
import torch
import torchmetrics
from lightning_toy import CLASSES, error_of, on_ranks, toy_loader, toy_module, toy_trainer
from torch.nn.functional import one_hot

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}


class Own(torchmetrics.Metric):
    """Its state is changed in place."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("losses", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, x, y):
        self.losses += (x - y).square().sum()
        self.count += y.numel()

    def compute(self):
        return self.losses / self.count


KINDS = {
    "own": Own,
    "mse": torchmetrics.MeanSquaredError,
    "collection": lambda: torchmetrics.MetricCollection([Own(), torchmetrics.MeanAbsoluteError()]),
}


def trained(folder, kind, smp):
    def training_step(self, batch, batch_idx):
        out, targets = self.net(batch[0]), one_hot(batch[1], CLASSES).float()
        value = self.metric(out, targets)
        value = sum(value.values()) if isinstance(value, dict) else value
        self.log("value", value)
        return value if kind == "own" else torch.nn.functional.l1_loss(out, targets) + 0.1 * value

    module = toy_module(
        training_step=training_step, configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.1)
    )
    module.metric = KINDS[kind]()
    trainer = toy_trainer(folder, smp=smp, max_epochs=1)
    trainer.fit(module, toy_loader(shuffle=False))
    return float(trainer.callback_metrics["value"]), dict(module.net.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_trained_on(tmp_path, kind):
    value, weights = on_ranks(trained, 1, tmp_path, kind, None)[0]
    for found in on_ranks(trained, 2, tmp_path, kind, PP2):
        assert found[0] == pytest.approx(value, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(found[1][name], weight, rtol=1e-5, atol=1e-7)


def not_trainable(folder):
    def training_step(self, batch, batch_idx):
        self.metric.update(self.net(batch[0]), one_hot(batch[1], CLASSES).float())
        return self.metric.compute()

    module = toy_module(training_step=training_step)
    module.metric = Own()
    return error_of(lambda: toy_trainer(folder, smp=PP2, max_epochs=1).fit(module, toy_loader()))


def test_a_loss_of_values_that_were_read_is_an_error(tmp_path):
    for error in on_ranks(not_trainable, 2, tmp_path):
        assert "does not require a gradient" in error
