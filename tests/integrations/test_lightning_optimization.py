"""What users do around the optimizer's step, and steps that skip a batch: the weights of plain Lightning."""

import re

import pytest
import torch
from lightning_toy import CLASSES, FEATURES, on_ranks, quiet, toy_data, toy_module, toy_trainer
from torch import nn
from torch.utils.data import DataLoader, Subset

from smp_strategy.errors import PeerFailedError, SMPError

STEPS, BATCH = 6, 8


def plain_init(self):
    layers = (nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    self.net = nn.Sequential(*layers, nn.Linear(16, CLASSES))


def sgd(self):
    return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def groups(self):
    parts = [
        {"params": self.net[:4].parameters(), "lr": 0.3},
        {"params": self.net[4:].parameters(), "weight_decay": 0.1},
    ]
    return torch.optim.AdamW(parts, lr=0.01)


def clip_twice(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
    self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="value")
    self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="value")


def clip_by_norm(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
    if self.current_epoch == 0:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


def warm_up(self, epoch, batch_idx, optimizer, optimizer_closure):
    optimizer.step(closure=optimizer_closure)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def every_second(self, epoch, batch_idx, optimizer, optimizer_closure):
    if batch_idx % 2 == 0:
        optimizer.step(closure=optimizer_closure)
    else:
        optimizer_closure()


def scale_gradients(self, optimizer):
    norm = torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm()
    self.log("norm", norm)
    for parameter in self.parameters():
        parameter.grad.mul_(0.5)


CASES = {
    "groups": {"configure_optimizers": groups},
    "clipping by value": {"configure_gradient_clipping": clip_twice},
    "clipping by norm": {"configure_gradient_clipping": clip_by_norm},
    "optimizer_step": {"optimizer_step": warm_up},
    "optimizer_step without a step": {"optimizer_step": every_second},
    "on_before_optimizer_step": {"on_before_optimizer_step": scale_gradients},
}


def fit(folder, overrides, smp, *, per_replica=False, **options):
    """Train; ``per_replica``: on this replica's share of each batch."""

    def train_dataloader(self):
        data = toy_data(STEPS * BATCH)
        mesh = getattr(self.trainer.strategy, "mesh", None)
        if per_replica and mesh is not None:
            mine = [index for index in range(len(data)) if index // BATCH % mesh.dp == mesh.dp_rank]
            return DataLoader(Subset(data, mine), batch_size=BATCH)
        return DataLoader(data, batch_size=2 * BATCH if per_replica else BATCH)

    torch.manual_seed(0)
    module = toy_module(**{"configure_optimizers": sgd, "train_dataloader": train_dataloader, **overrides})
    plain_init(module)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False, **options)
    trainer.fit(module)
    trainer.save_checkpoint(folder / "end.ckpt")
    weights = torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]
    return weights, trainer.global_step, {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_what_is_done_around_the_optimizer_step_has_the_weights_of_plain_lightning(name, pp, tmp_path):
    options = {"gradient_clip_val": 0.05} if name == "clipping by value" else {}
    with quiet():
        expected, global_step, logged = fit(tmp_path / "one", CASES[name], None, **options)
    smp = {"pipeline_parallel_degree": pp, "microbatches": 1}
    for found, found_step, found_logged in on_ranks(fit_with, pp, tmp_path / "smp", CASES[name], smp, options):
        assert found_step == global_step
        assert found_logged == pytest.approx(logged, rel=1e-5)
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


def fit_with(folder, overrides, smp, options):
    return fit(folder, overrides, smp, **options)


# Skipping


def skip_batches(self, batch, batch_idx):
    if batch_idx in (0, 3):
        return None
    loss = self.loss(batch)
    self.log("loss", loss)
    return {"loss": loss, "size": batch[0].size(0)}


def skip_by_value(self, batch, batch_idx):
    loss = self.loss(batch)
    return None if loss > 1.42 else loss


def skip_early(self, batch, batch_idx):
    if (batch[0][:, 0] > 1).any():
        return None
    return self.loss(batch)


def by_hand(step, microbatches, replicas=1):
    """One process in which a skipped microbatch adds nothing."""
    torch.manual_seed(0)
    module = toy_module(configure_optimizers=sgd, training_step=step, log=lambda *args: None)
    plain_init(module)
    optimizer = sgd(module)
    skipped = 0
    for index, (inputs, targets) in enumerate(DataLoader(toy_data(STEPS * BATCH), batch_size=replicas * BATCH)):
        optimizer.zero_grad()
        num = microbatches * replicas
        for part in zip(inputs.chunk(num), targets.chunk(num), strict=True):
            output = step(module, part, index)
            if output is None:
                skipped += 1
                continue
            loss = output["loss"] if isinstance(output, dict) else output
            (loss / num).backward()
        optimizer.step()
    return module.state_dict(), skipped


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("step", [skip_batches, skip_by_value, skip_early])
def test_a_skipped_microbatch_adds_nothing(step, pp, tmp_path):
    expected, skipped = by_hand(step, 4)
    assert 0 < skipped < 4 * STEPS
    smp = {"pipeline_parallel_degree": pp, "microbatches": 4}
    for found, global_step, _ in on_ranks(fit_with, pp, tmp_path, {"training_step": step}, smp, {}):
        assert global_step == STEPS  # as in plain Lightning, which calls the optimizer without gradients
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


def test_a_replica_that_skips_contributes_nothing(tmp_path):
    expected, skipped = by_hand(skip_early, 1, replicas=2)
    assert 0 < skipped < STEPS
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1}
    for found, _, _ in on_ranks(fit_with, 4, tmp_path, {"training_step": skip_early}, smp, {"per_replica": True}):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


# Several evaluations


class Perturbing(torch.optim.SGD):
    """Evaluates the loss a second time, at other weights."""

    def step(self, closure=None):
        closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad)
        closure()
        return super().step()


class OwnLBFGS(torch.optim.LBFGS):
    pass


def perturbing(self):
    return Perturbing(self.parameters(), lr=0.1)


def lbfgs(self):
    return OwnLBFGS(self.parameters())


def error_of(folder, overrides, smp):
    try:
        fit(folder, overrides, smp)
    except PeerFailedError:
        return ""
    except SMPError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("optimizer", [perturbing, lbfgs])
def test_an_optimizer_that_evaluates_several_times_is_refused(optimizer, tmp_path):
    smp = {"pipeline_parallel_degree": 2, "microbatches": 2}
    messages = {text for text in on_ranks(error_of, 2, tmp_path, {"configure_optimizers": optimizer}, smp) if text}
    assert len(messages) == 1, messages
    assert re.search("evaluates the loss several times per step", messages.pop())


# Schedulers


def reduced_at_a_plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own"}}


def rates_at_a_plateau(folder, smp, is_averaged):
    """Learning rates at the ends of epochs in which the loss falls on one replica and rises on the other."""

    def validate(self, batch, batch_idx):
        value = (1.0 - 0.2 * self.current_epoch) if self.trainer.global_rank == 0 else 1.0 + 0.1 * self.current_epoch
        self.log("own", torch.tensor(value), sync_dist=is_averaged)

    rates = []
    overrides = {
        "configure_optimizers": reduced_at_a_plateau,
        "validation_step": validate,
        "on_validation_epoch_end": lambda self: rates.append(self.optimizers().param_groups[0]["lr"]),
    }
    module, trainer = toy_module(**overrides), toy_trainer(folder, smp=smp, max_epochs=4, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(toy_data(), batch_size=BATCH), DataLoader(toy_data(), batch_size=BATCH))
    return rates


def error_at_a_plateau(folder, smp):
    with pytest.raises(SMPError) as caught:
        rates_at_a_plateau(folder, smp, is_averaged=False)
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_scheduler_that_looks_at_samples_of_one_replica_is_refused(shards, tmp_path):
    smp = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": shards}
    for error in on_ranks(error_at_a_plateau, 2, tmp_path, smp):
        assert "`lr` of parameter group 0 is 0.4 on rank 0, 0.2 on rank 1" in error
        assert "average the value over all ranks before (`self.log(..., sync_dist=True)`)" in error
    assert on_ranks(rates_at_a_plateau, 2, tmp_path, smp, is_averaged=True) == [[0.4] * 4] * 2
