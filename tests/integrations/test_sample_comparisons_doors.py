"""A loss that compares samples, and norms over them, are told of once at every door; evaluation sees whole batches."""

import contextlib
import io
import logging

import pytest
import torch
import torch.nn.functional as F
from accelerate_checks import fresh_accelerator
from hf_checks import alone, arguments, on_ranks
from lightning_toy import toy_module, toy_trainer
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from transformers import Trainer

import smp_strategy.smp as smp

WIDTH, SAMPLES, BATCH = 8, 18, 8  # the last batch of an evaluation has two samples; it would be 0 in microbatches
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 4}
COMPARES = "The loss compares samples of its batch: `matmul` (in "
NORMS = "normalize by the statistics of each microbatch"


class Pairs(Dataset):
    def __init__(self, samples=SAMPLES):
        generator = torch.Generator().manual_seed(2)
        self.x, self.y = torch.randn(2, samples, WIDTH, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class Clip(nn.Module):
    """Two towers and a contrastive loss, as CLIP has them."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        torch.manual_seed(0)
        self.x, self.y = (
            nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Tanh()) for _ in range(2)))
            for _ in "xy"
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, y, return_loss=True):
        x, y = F.normalize(self.x(x), dim=-1), F.normalize(self.y(y), dim=-1)
        logits = self.scale.exp() * x @ y.t()
        labels = torch.arange(len(logits))
        return {"loss": F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels), "logits": x}


def loader(samples=SAMPLES):
    return DataLoader(Pairs(samples), batch_size=BATCH)


def training_loader():
    return loader(2 * BATCH)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@contextlib.contextmanager
def heard():
    """What is printed or logged."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = rank_zero.log  # of the distribution of Lightning that was imported last
    level, filters = logger.level, logger.filters
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # tests before this one may have made Lightning silent
    logger.filters = []
    try:
        with contextlib.redirect_stdout(text):
            yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.filters = filters


def evaluated(model):
    """Losses of whole batches before training, in one process."""
    model.eval()
    with torch.no_grad():
        return [model(**batch)["loss"].item() for batch in loader()]


def trained():
    """Losses and weights of one process."""
    model, losses = Clip(nn.LayerNorm), []
    optimizer = optimizer_of(model)
    for batch in training_loader():
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def by_accelerate(options, norm):
    with heard() as text:
        model = Clip(norm)
        accelerator = fresh_accelerator(options)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        model.eval()
        with torch.no_grad():
            before = [model(**batch)["loss"].item() for batch in accelerator.prepare(loader())]
        model.train()
        losses = []
        for batch in accelerator.prepare(training_loader()):
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return before, losses, accelerator.get_state_dict(model), text.getvalue()


class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def by_trainer(options, norm, folder):
    given = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    given |= {"eval_strategy": "epoch", "per_device_eval_batch_size": BATCH, "num_train_epochs": 1}
    with heard() as text:
        args = arguments(folder, options, per_device_train_batch_size=BATCH, **given)
        trainer = InOrder(model=Clip(norm), args=args, train_dataset=Pairs(2 * BATCH), eval_dataset=Pairs())
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = trainer.model.state_dict() if options is None else trainer.accelerator.get_state_dict(trainer.model)
    return before, losses, weights, text.getvalue()


def by_lightning(options, norm, folder, *, manual=False):
    seen, before = [], []

    def step(self, batch, batch_idx):
        loss = self.net(**batch)["loss"]
        seen.append(loss)
        if not manual:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        return self.optimizers().step()

    def check(self, batch, batch_idx):
        before.append(len(batch["x"]))
        self.log("loss", self.net(**batch)["loss"], batch_size=len(batch["x"]))

    module = toy_module(
        training_step=step, validation_step=check, configure_optimizers=lambda self: optimizer_of(self.net)
    )
    module.net, module.automatic_optimization, losses = Clip(norm), not manual, []
    module.on_train_batch_start = lambda *args: None
    module.on_train_batch_end = lambda outputs, *args: losses.append(None if manual else outputs["loss"].item())
    with heard() as text:
        trainer = toy_trainer(folder, smp=options, max_epochs=1)
        (metrics,) = trainer.validate(module, loader(), verbose=False)
        trainer.fit(module, training_loader())
    assert set(before) <= {BATCH, SAMPLES % BATCH, BATCH // 4}  # the last: a dry run
    return metrics["loss"], losses, module.net.state_dict(), text.getvalue()


def by_sagemaker(options, norm):
    with heard() as text:
        smp.init({"microbatches": 4, "partitions": 2})
        model = smp.DistributedModel(Clip(norm))
        optimizer = smp.DistributedOptimizer(optimizer_of(model))

        @smp.step
        def step(model, x, y):
            loss = model(x, y)["loss"]
            model.backward(loss)
            return loss

        for batch in training_loader():
            optimizer.zero_grad()
            step(model, batch["x"], batch["y"])
            optimizer.step()
    return None, None, None, text.getvalue()


def mean_of(losses):
    sizes = [BATCH, BATCH, SAMPLES % BATCH]
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / SAMPLES


DOORS = ["accelerate", "trainer", "lightning", "lightning with manual optimization", "sagemaker"]


def run(door, options, folder, norm=nn.BatchNorm1d):
    if door == "accelerate":
        return on_ranks(by_accelerate, 2, options, norm)[0]
    if door == "trainer":
        return on_ranks(by_trainer, 2, options, norm, folder)[0]
    if door == "sagemaker":
        return on_ranks(by_sagemaker, 2, options, norm)[0]
    return on_ranks(by_lightning, 2, options, norm, folder, manual="manual" in door)[0]


@pytest.mark.parametrize("door", DOORS)
def test_what_depends_on_microbatches_is_told_once(door, tmp_path):
    before, _, _, text = run(door, PP2, tmp_path)
    assert text.count(COMPARES) == 1
    assert "With 4 microbatches it is computed in each microbatch (2 samples) instead of the batch (8 samples)" in text
    assert "set `microbatches=1`: then stages do not overlap (a step of 2 equal stages takes 1.6 times as long)" in text
    assert text.count(NORMS) == 1
    if before is not None:
        expected = evaluated(Clip())
        assert before == pytest.approx(expected if door == "accelerate" else mean_of(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("door", "options"),
    [
        ("accelerate", {"pipeline_parallel_degree": 2}),
        ("trainer", {}),
        ("lightning", {"pipeline_parallel_degree": 2}),
        ("lightning", {}),
    ],
)
def test_without_a_number_of_microbatches_there_is_one_for_such_a_loss(door, options, tmp_path):
    _, losses, weights, text = run(door, options, tmp_path, nn.LayerNorm)
    expected = alone(by_trainer, None, nn.LayerNorm, tmp_path / "alone")[1:3] if door == "trainer" else trained()
    assert text.count("So batches (8 samples) are not cut into microbatches") == 1
    assert losses == pytest.approx(expected[0], rel=1e-4)
    for name, value in expected[1].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def test_evaluation_is_cut_if_that_is_asked_for(tmp_path):
    before, _, _, _ = run("accelerate", {**PP2, "evaluation_microbatches": 4}, tmp_path)
    assert before[0] < evaluated(Clip())[0] / 2
