"""Gradients that are sparse or complex: over replicas, stages and shards the numbers of one process."""

import pytest
import torch
from lightning_toy import CLASSES, FEATURES, error_of, on_ranks, quiet, shared_loader, toy_module, toy_trainer
from torch import nn

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
SDP2 = {"sharded_data_parallel_degree": 2}
LAYOUTS = {
    "pp2": PP2,
    "zero1": {"pipeline_parallel_degree": 1, "shard_optimizer_state": True},
    "rep2": {"pipeline_parallel_degree": 1},
}


class Rows(nn.Module):
    """Rows of a table, of which a batch uses few."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, FEATURES, sparse=True)

    def forward(self, x):
        return self.table((x[:, :3].abs() * 10).long().clamp(0, 39)).sum(1)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(FEATURES, FEATURES, dtype=torch.cfloat))

    def forward(self, x):
        return x + (x.to(torch.cfloat) @ self.weight).abs()


def sgd(self):
    return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def of_kinds(self):
    sparse = torch.optim.SparseAdam(self.net[0].parameters(), lr=0.05, eps=1e-2)
    return sparse, torch.optim.Adam(self.net[1:].parameters(), lr=0.05, eps=1e-2)


def by_hand(self, batch, batch_idx):
    for optimizer in self.optimizers():
        optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    for optimizer in self.optimizers():
        optimizer.step()


def train(folder, smp, first, overrides, options):
    module = toy_module(**overrides)
    rest = (nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, CLASSES))
    torch.manual_seed(0)
    module.net = nn.Sequential(first(), *rest)
    module.automatic_optimization = "training_step" not in overrides
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False, **options)
    trainer.fit(module, shared_loader(trainer, smp))
    return {name: value.clone() for name, value in module.state_dict().items()}


SPARSE = {
    "accumulated": (Rows, {"configure_optimizers": sgd}, {"accumulate_grad_batches": 2}),
    "manual": (Rows, {"configure_optimizers": of_kinds, "training_step": by_hand}, {}),
}
CLIPPED = (Complex, {"configure_optimizers": sgd}, {"gradient_clip_val": 0.1})


def assert_like_one_process(folder, layouts, case):
    with quiet():
        expected = train(folder, None, *case)
    for smp in layouts.values():
        for found in on_ranks(train, 2, folder, smp, *case):
            torch.testing.assert_close(found, expected, msg=lambda text, smp=smp: f"{smp}: {text}")


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_gradients_are_summed_over_replicas_and_stay_sparse(tmp_path, kind):
    assert_like_one_process(tmp_path, LAYOUTS, SPARSE[kind])


def test_complex_gradients_are_clipped_by_their_norm(tmp_path):
    assert_like_one_process(tmp_path, {**LAYOUTS, "sdp2": SDP2}, CLIPPED)


def refused(folder, case):
    return error_of(lambda: train(folder, SDP2, *case))


def test_shards_refuse_sparse_gradients(tmp_path):
    for error in on_ranks(refused, 2, tmp_path, SPARSE["accumulated"]):
        assert "is sparse, and shards are dense: use `sparse=False`" in error
