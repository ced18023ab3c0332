"""Collectives in Lightning's steps: the numbers of its own DDP, and the same on any layout."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_toy import metrics_of, on_ranks, toy_data, toy_module, toy_trainer
from torch.utils.data import DataLoader, Subset

STEPS, BATCH = 3, 8
STAGES, SHARDS = {"pipeline_parallel_degree": 2}, {"sharded_data_parallel_degree": 2}
LAYOUTS = {
    "stages": (4, 2, STAGES),
    "stages and shards": (4, 2, {**STAGES, **SHARDS}),
    "shards": (2, 2, SHARDS),
    "replicas": (2, 2, {"pipeline_parallel_degree": 1}),
    "one replica": (2, 1, STAGES),
}


def train(self, batch, batch_idx):
    inputs, targets = batch
    z = self.net(inputs)
    others = self.all_gather(z, sync_grads=True).reshape(-1, z.shape[-1])
    labels = torch.arange(len(z)) + dist.get_rank() * len(z)
    nest = self.all_gather({"mean": z.detach().mean(), "targets": [targets]})
    strategy = self.trainer.strategy
    strategy.barrier()
    mean = strategy.reduce(z.detach().mean(), reduce_op="mean")
    first = strategy.broadcast(inputs[0, 0].item(), src=0)
    extra = nest["mean"].mean() + nest["targets"][0].float().mean() + mean + first
    loss = F.cross_entropy(z @ others.t(), labels) + 0.1 * extra * z.mean()
    self.log("loss", loss, sync_dist=True)
    return loss


def validate(self, batch, batch_idx):
    self.log("gathered", self.all_gather(self.net(batch[0])).pow(2).mean())


def by_hand(self, batch, batch_idx):
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(train(self, batch, batch_idx))
    optimizer.step()


def fit(folder, smp, overrides):
    def loader(self):
        mesh = getattr(self.trainer.strategy, "mesh", None)
        replicas, replica = (dist.get_world_size(), dist.get_rank()) if mesh is None else (mesh.dp, mesh.dp_rank)
        data = toy_data(STEPS * BATCH * replicas)
        mine = [index for index in range(len(data)) if index // BATCH % replicas == replica]
        return DataLoader(Subset(data, mine), batch_size=BATCH)

    module = toy_module(validation_step=validate, train_dataloader=loader, val_dataloader=loader, **overrides)
    options = {"use_distributed_sampler": False, "num_sanity_val_steps": 0}
    if smp is None:
        options |= {"strategy": "ddp", "devices": dist.get_world_size()}
    trainer = toy_trainer(folder, smp=smp, **options)
    trainer.fit(module)
    return metrics_of(trainer), {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_lightnings_ddp(tmp_path, layout):
    ranks, replicas, smp = LAYOUTS[layout]
    wanted = on_ranks(fit, replicas, tmp_path, None, {"training_step": train})[0]
    for found in on_ranks(fit, ranks, tmp_path, {**smp, "microbatches": 1}, {"training_step": train}):
        assert_same(found, wanted)


def test_microbatches_meet_one_by_one(tmp_path):
    """On any layout alike: four gathers of two samples of each replica."""
    options = {"microbatches": 4}
    wanted = on_ranks(fit, 2, tmp_path, {"pipeline_parallel_degree": 1, **options}, {"training_step": train})[0]
    for found in on_ranks(fit, 4, tmp_path, {**STAGES, **options}, {"training_step": train}):
        assert_same(found, wanted)


def test_manual_optimization_meets_too(tmp_path):
    overrides = {"training_step": by_hand, "automatic_optimization": property(lambda self: False)}
    wanted = on_ranks(fit, 2, tmp_path, None, overrides)[0]
    assert_same(on_ranks(fit, 4, tmp_path, {**STAGES, "microbatches": 1}, overrides)[0], wanted)
