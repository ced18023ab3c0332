"""Collectives in Lightning's steps: the numbers of its own DDP, and the same on any layout."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
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


@pytest.mark.dear
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


class Counting(torch.nn.Linear):
    """A unit that keeps the mean of what it returns, and uses that of all ranks' batches if ``on_step``."""

    def __init__(self, inputs, outputs, on_step):
        super().__init__(inputs, outputs)
        self.mean = torchmetrics.MeanMetric(dist_sync_on_step=on_step)
        self.seen = torchmetrics.CatMetric()

    def forward(self, x):
        y = super().forward(x)
        self.seen.update(y.detach()[0, 0])
        return y + 0.1 * self.mean(y.detach().mean())


def count(self, batch, batch_idx):
    self.log("first", self.net[0].mean, on_step=False, on_epoch=True)
    self.log("last", self.net[2].mean, on_step=False, on_epoch=True)
    return self.loss(batch)


def compute_by_hand(self):
    self.computed = [self.net[place].seen.compute().sort().values for place in (0, 2)]


def fit_with_metrics(folder, smp, on_step):
    def net(self):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            *(Counting(8, 16, on_step), torch.nn.Linear(16, 16), Counting(16, 16, on_step), torch.nn.Linear(16, 4))
        )
        self.configure_model = lambda: None

    overrides = {"training_step": count, "on_train_epoch_end": compute_by_hand, "configure_model": net}
    module = None

    def keep(self, *args):
        nonlocal module
        module = self

    found = fit(folder, smp, {**overrides, "on_fit_start": keep})
    return *found, module.computed


@pytest.mark.dear
@pytest.mark.parametrize("on_step", [False, True])
def test_metrics_inside_of_units_count_all_replicas(tmp_path, on_step):
    wanted = on_ranks(fit_with_metrics, 2, tmp_path, None, on_step)[0]
    smp = {**STAGES, "microbatches": 1}
    options = {**smp, "activation_checkpointing": "all"} if on_step else smp
    for found in on_ranks(fit_with_metrics, 4, tmp_path, options, on_step):
        assert_same(found, wanted)
        torch.testing.assert_close(found[2], wanted[2])
