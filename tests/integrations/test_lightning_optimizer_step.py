"""An overridden `optimizer_step` that calls the closure itself, in a single process and over ranks."""

import pytest
import torch
from lightning_toy import error_of, on_ranks, quiet, shared_loader, toy_loader, toy_module, toy_trainer

LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "sdp2": {"sharded_data_parallel_degree": 2},
    "tp2": {"tensor_parallel_degree": 2},
    "zero1": {"pipeline_parallel_degree": 1, "shard_optimizer_state": True},
    "rep2": {"pipeline_parallel_degree": 1},
}


class OwnSGD(torch.optim.SGD):
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        super().step()
        return loss


def alone(self, epoch, batch_idx, optimizer, closure):
    """Lightning's recipe to leave updates out."""
    closure() if batch_idx % 3 == 0 else optimizer.step(closure=closure)


def twice(self, epoch, batch_idx, optimizer, closure):
    closure()
    optimizer.step(closure=closure)


def by_norm(self, epoch, batch_idx, optimizer, closure):
    closure()
    norm = torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm()
    self.numbers.append(norm.item())
    if norm < 0.45:
        optimizer.step()


def by_loss(self, epoch, batch_idx, optimizer, closure):
    loss = self.trainer.strategy.reduce(closure())
    self.numbers.append(float(loss))
    if loss < 1.4:
        optimizer.step(closure=lambda: loss)


def by_hand(self, epoch, batch_idx, optimizer, closure):
    optimizer.step(closure=closure) if batch_idx % 2 else closure()


def zero_grad_by_hand(self, epoch, batch_idx, optimizer):
    if batch_idx % 2 == 0:
        optimizer.zero_grad()


def optimizers(self):
    return OwnSGD(self.parameters(), lr=0.1, momentum=0.9)


PLAIN_SGD = {"configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)}
STEPS = {
    "alone": {"optimizer_step": alone, **PLAIN_SGD},
    "twice": {"optimizer_step": twice, **PLAIN_SGD},
    "by_norm": {"optimizer_step": by_norm, **PLAIN_SGD},
    "by_loss": {"optimizer_step": by_loss, **PLAIN_SGD},
    "by_hand": {"optimizer_step": by_hand, "optimizer_zero_grad": zero_grad_by_hand, **PLAIN_SGD},
    "own_optimizer": {
        "optimizer_step": lambda self, epoch, batch_idx, optimizer, closure: optimizer.step(closure=closure),
        "configure_optimizers": optimizers,
    },
}


def train(folder, smp, name):
    module = toy_module(**STEPS[name])
    module.numbers = []
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, shared_loader(trainer, smp))
    return {key: value.clone() for key, value in module.state_dict().items()}, module.numbers, trainer.global_step


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_calls_the_closure_itself_trains_as_in_one_process(tmp_path, name, layout):
    with quiet():
        weights, numbers, steps = train(tmp_path, None, name)
    for found in on_ranks(train, 2, tmp_path, LAYOUTS[layout], name):
        torch.testing.assert_close(found[0], weights)
        assert found[1] == pytest.approx(numbers, rel=1e-4)
        assert found[2] == steps


def on_one_replica(self, epoch, batch_idx, optimizer, closure):
    closure()
    if self.global_rank == 0 or batch_idx != 2:
        optimizer.step()


def train_apart(folder, smp):
    module = toy_module(optimizer_step=on_one_replica, **PLAIN_SGD)
    return error_of(lambda: toy_trainer(folder, smp=smp, max_epochs=1).fit(module, toy_loader()))


@pytest.mark.parametrize("layout", ["rep2", "sdp2", "zero1"])
def test_an_update_on_some_replicas_only_is_an_error_on_all(tmp_path, layout):
    for error in on_ranks(train_apart, 2, tmp_path, LAYOUTS[layout]):
        assert "`optimizer_step` has updated the weights" in error
        assert "self.trainer.strategy.reduce(loss)" in error
