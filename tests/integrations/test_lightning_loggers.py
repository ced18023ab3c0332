"""Calls of loggers inside steps and hooks write once, with the values of one process."""

from importlib import import_module

import pytest
import torch
from lightning_toy import NEWER, on_ranks, quiet, toy_loader, toy_module, toy_trainer
from torch import nn

logger_module = import_module(f"{NEWER}.loggers.logger")


class Experiment:
    def __init__(self):
        self.written = []

    def add_scalar(self, tag, value, global_step=None):
        self.written.append((tag, float(value), global_step))

    def add_histogram(self, tag, values, global_step=None):
        self.written.append((tag, values.numel(), float(values.sum()), global_step))

    def get_logdir(self):
        return "here"


class KeepingLogger(logger_module.Logger):
    """Like TensorBoard's: real on rank 0 and a dummy elsewhere."""

    def __init__(self):
        super().__init__()
        self.real = Experiment()

    name, version = "keeping", 0

    @property
    @logger_module.rank_zero_experiment
    def experiment(self):
        return self.real

    @import_module(f"{NEWER}.utilities.rank_zero").rank_zero_only
    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            if name != "epoch":
                self.real.written.append((name, float(value), step))

    def log_hyperparams(self, *args, **kwargs):
        pass


def training_step(self, batch, batch_idx):
    logits = self.net(batch[0])
    loss = nn.functional.cross_entropy(logits, batch[1])
    assert isinstance(self.logger, KeepingLogger)
    assert self.logger.experiment.get_logdir() == "here" or not self.trainer.is_global_zero
    self.logger.experiment.add_scalar("loss by hand", loss, self.global_step)
    self.logger.experiment.add_scalar("same", 1.5, global_step=self.global_step)
    self.logger.experiment.add_histogram("logits", logits, self.global_step)
    self.logger.log_metrics({"direct": loss, "largest": 2 * loss}, step=self.global_step)
    self.log("usual", loss)
    self.print("the loss is", loss)
    return loss


def validation_step(self, batch, batch_idx):
    self.logger.experiment.add_scalar("val by hand", self.loss(batch), batch_idx)


def on_train_epoch_end(self):
    for name, parameter in self.named_parameters():
        self.logger.experiment.add_histogram(name, parameter, self.current_epoch)


def on_before_optimizer_step(self, optimizer):
    self.logger.experiment.add_scalar("norm", self.net[0].weight.grad.norm(), self.global_step)


def fit(folder, smp_options):
    module = toy_module(
        training_step=training_step,
        validation_step=validation_step,
        on_train_epoch_end=on_train_epoch_end,
        on_before_optimizer_step=on_before_optimizer_step,
    )
    logger = KeepingLogger()
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=2, logger=logger, log_every_n_steps=1)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
    assert type(logger) is KeepingLogger
    assert "_smp_noting" not in vars(logger)
    return logger.real.written


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
def test_loggers_write_what_they_write_in_one_process(pp, tmp_path, capfd):
    with quiet():
        expected = fit(tmp_path, None)
    printed = capfd.readouterr().out.count("the loss is")
    first, *others = on_ranks(fit, pp, tmp_path, {"pipeline_parallel_degree": pp, "microbatches": 4})
    assert len(expected) > 50
    assert [entry[0] for entry in sorted(first, key=str)] == [entry[0] for entry in sorted(expected, key=str)]
    for mine, plain in zip(sorted(first, key=by_tag), sorted(expected, key=by_tag), strict=True):
        assert mine[0] == plain[0]
        assert mine[1:] == pytest.approx(plain[1:], rel=1e-3, abs=1e-4)
    assert others == [[]] * (pp - 1)
    assert capfd.readouterr().out.count("the loss is") == printed == 12


def by_tag(entry):
    return entry[0], entry[-1]


def test_calls_that_do_not_go_together_are_made_one_by_one():
    from smp_strategy.integrations.lightning.logging import DirectCall, direct_calls

    call = DirectCall(name="add_image", function=print)
    notes = [([call], [((torch.full((3, 2), value),), {})]) for value in (1.0, 2.0)]
    found = list(direct_calls(notes, [4, 4]))
    assert [float(args[0][0, 0]) for _, args, _ in found] == [1.0, 2.0]
