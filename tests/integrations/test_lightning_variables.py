"""Steps that keep things in variables around them, as scripts and notebooks do: as if nobody had run them dry."""

import pytest
import torch
from lightning_toy import on_ranks, quiet, shared_loader, toy_loader, toy_module, toy_trainer
from torch import nn

LOSSES: list[float] = []
ROWS: dict[str, list[torch.Tensor]] = {}
COUNT = 0


def keep(outputs, loss, value):
    global COUNT
    COUNT += 1
    LOSSES.append(value)
    ROWS.setdefault("outputs", []).append(outputs)
    ROWS.setdefault("losses", []).append(loss.detach())


def fit(folder, smp, reads):
    """What is in the variables after training."""
    kept, total = [], 0

    def validation_step(self, batch, batch_idx):
        nonlocal total
        outputs = self.net(batch[0])
        loss = torch.nn.functional.cross_entropy(outputs, batch[1])
        value = loss.item() if reads else float(batch_idx)
        total += 1
        kept.append(outputs)
        self.in_class.append(value)
        keep(outputs, loss, value)

    def on_validation_epoch_end(self):
        self.log("mean", torch.cat(kept).mean())
        self.log("kept", torch.cat(ROWS["outputs"]).std() + torch.stack(ROWS["losses"]).max())

    module = toy_module(validation_step=validation_step, on_validation_epoch_end=on_validation_epoch_end, in_class=[])
    trainer = toy_trainer(folder, smp=smp, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
    found = {name: float(trainer.callback_metrics[name]) for name in ("mean", "kept")}
    return found, list(LOSSES), list(module.in_class), COUNT, total, torch.cat(kept).tolist()


@pytest.mark.parametrize("reads", [False, True], ids=["looks at nothing", "looks at values"])
@pytest.mark.parametrize("pp", [1, 2])
def test_variables_around_the_step_hold_what_they_hold_in_one_process(pp, reads, tmp_path):
    with quiet():
        [(expected, *lists)] = on_ranks(fit, 1, tmp_path / "one", None, reads)
    smp = {"pipeline_parallel_degree": pp, "microbatches": 1}
    for found, *others in on_ranks(fit, pp, tmp_path / "smp", smp, reads):
        assert found == pytest.approx(expected, rel=1e-5)
        for mine, plain in zip(others, lists, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(plain), rtol=1e-5, atol=1e-6)


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, count):
        self.sum += value * count
        self.count += count


def add_up(folder, smp, num_sanity_val_steps):
    """What the step, in whichever kind, has added up, of values that it reads."""

    def loss_of(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.total += loss.item() * len(batch[0])
        self.meters["train"].update(loss.item(), len(batch[0]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.val_total += float(loss_of(self, batch)) * len(batch[0])

    def test_step(self, batch, batch_idx):
        self.meters["test"].sum += loss_of(self, batch).item() * len(batch[0])

    steps = {"training_step": training_step, "validation_step": validation_step, "test_step": test_step}
    sums = {"total": 0.0, "val_total": 0.0, "meters": {"train": Meter(), "test": Meter()}}
    module = toy_module(**steps, **sums)
    trainer = toy_trainer(folder, smp=smp, max_epochs=2, num_sanity_val_steps=num_sanity_val_steps)
    loader = toy_loader(shuffle=False)
    trainer.fit(module, loader, loader)
    trainer.test(module, loader, verbose=False)
    meters = [(meter.sum, meter.count) for meter in module.meters.values()]
    return [module.total, module.val_total, *meters[0], *meters[1]]


@pytest.mark.parametrize("num_sanity_val_steps", [0, 2])
@pytest.mark.parametrize("pp", [2, 4])
def test_sums_over_values_are_those_of_one_process(pp, num_sanity_val_steps, tmp_path):
    with quiet():
        [expected] = on_ranks(add_up, 1, tmp_path / "one", None, num_sanity_val_steps)
    smp = {"pipeline_parallel_degree": pp, "microbatches": 4}
    for found in on_ranks(add_up, pp, tmp_path / "smp", smp, num_sanity_val_steps):
        assert found == pytest.approx(expected, rel=1e-5)


class Annealed(nn.Module):
    """Has a number that the step changes from outside."""

    def __init__(self):
        super().__init__()
        self.layer, self.temperature = nn.Linear(8, 8), 1.0

    def forward(self, x):
        return x + torch.tanh(self.layer(x) / self.temperature)


def anneal(folder, smp, reads, accumulates=1):
    """Weights after steps of which each microbatch leaves other numbers in units."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        assert not reads or loss.item() > 0
        for block in self.net[:4]:
            block.temperature *= 0.8
        return loss

    module = toy_module(training_step=training_step)
    torch.manual_seed(1)
    module.net = nn.Sequential(*(Annealed() for _ in range(4)), nn.Linear(8, 4))
    options = {"max_epochs": 1, "use_distributed_sampler": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer = toy_trainer(folder, smp=smp, accumulate_grad_batches=accumulates, **options)
    trainer.fit(module, shared_loader(trainer, smp, batch_size=8 // accumulates))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("layout", "reads"), [({"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2}, False), ({}, True)]
)
def test_numbers_that_a_step_leaves_in_units_are_those_of_one_process(layout, reads, tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 4, **layout}
    with quiet():
        (expected,) = on_ranks(anneal, 1, tmp_path / "one", None, reads, 4)
    for found in on_ranks(anneal, 2, tmp_path / "smp", smp, reads):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
