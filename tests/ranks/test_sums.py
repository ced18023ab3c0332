"""Gradients are sent off while others are computed, and the sums are those of gradients sent off at the end."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel import zero1 as state_sharding
from smp_strategy.data_parallel.bucketed_all_reduce import BucketedAllReduce
from smp_strategy.data_parallel.gradient_sums import alike
from smp_strategy.distributed import buckets
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS, batch_for

STEPS, SAMPLES = 3, 6


class Twice(nn.Module):
    """A block that is recomputed twice adds to its gradient in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True).tanh()
        return self.last(x)


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Twice()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["tokens"][:, :8].float() / 32).square().mean()


def small_buckets() -> None:
    buckets.buckets.__defaults__ = (256,)
    state_sharding.BUCKET_BYTES = 256


def make(name: str) -> Any:
    torch.manual_seed(0)
    return Recomputing() if name == "recomputed twice" else MODELS[name]()


def batch_of(name: str, number: int) -> Any:
    return batch_for("text" if name == "recomputed twice" else name, number, SAMPLES)


def train(name: str, options: dict[str, Any], reduces: bool, skips: bool) -> tuple[dict[str, Tensor], bool, int]:
    """Weights after some steps, whether averages may still overlap, and how many buckets were sent off early."""
    small_buckets()
    early = []
    leave = BucketedAllReduce.send_rest

    def counting(self: BucketedAllReduce, notes: Sequence[int] = ()) -> None:
        if self._sent:
            early.append(len(self._sent))
        leave(self, notes)

    BucketedAllReduce.send_rest = counting  # type: ignore[method-assign]
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])
    for step in range(STEPS):
        batch = batch_of(name, step * engine.mesh.dp + engine.mesh.dp_rank)
        skipped = skips and engine.mesh.dp_rank == 1 and step == 1
        result = engine.train_step(
            model.loss, batch, loss_of=(lambda _: None) if skipped else (lambda loss: loss), reduces=reduces
        )
        model.zero_grad()
        if step == 0 and skips:
            continue  # and its gradients are forgotten
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    return engine.saved.full_state_dict(), engine.local_model.reduction._overlaps, sum(early)


NAMES = ["text", "text, tied", "weights in the glue", "skips", "gpt2"]
LAYOUTS = [(2, 1, 1), (2, 1, 3), (4, 2, 3)]
CASES = [(name, *layout) for name in NAMES for layout in LAYOUTS]
CASES += [("recomputed twice", *layout) for layout in LAYOUTS[:2]]  # it has one unit


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(("name", "world", "pp", "microbatches"), CASES)
def test_early_averages_are_those_of_the_end(name, world, pp, microbatches, shards):
    options = {"pipeline_parallel_degree": pp, "microbatches": microbatches, "shard_optimizer_state": shards}
    expected = run_ranks(train, world, name, options, False, False)
    found = run_ranks(train, world, name, options, True, False)
    assert found[0][0].keys() == expected[0][0].keys()
    for key, value in expected[0][0].items():
        assert torch.equal(found[0][0][key], value), key
    assert all(early == 0 for *_, early in expected)
    # All weights of the one with weights in the glue are.
    assert all((early > 0) == (name != "weights in the glue") for *_, early in found)
    assert [overlaps for _, overlaps, _ in found] == [name != "recomputed twice"] * world


@pytest.mark.parametrize("shards", [False, True])
def test_replicas_that_skip_a_step_and_steps_that_are_forgotten(shards):
    options = {"pipeline_parallel_degree": 1, "microbatches": 2, "shard_optimizer_state": shards}
    expected = run_ranks(train, 2, "text", options, False, True)
    found = run_ranks(train, 2, "text", options, True, True)
    for key, value in expected[0][0].items():
        assert torch.equal(found[0][0][key], value), key


def sent_off() -> tuple[list[int], list[float]]:
    """How many buckets were under way when each layer's gradient was there, and the sums."""
    small_buckets()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    sums = BucketedAllReduce(alike([layer.weight for layer in reversed(net)]), dist.group.WORLD)
    under_way = []
    with sums.watching():
        for layer in net:
            layer.weight.register_post_accumulate_grad_hook(lambda _: under_way.append(len(sums._sent)))
        (net(torch.ones(2, 8)).sum() * (dist.get_rank() + 1)).backward()
    sums.send_rest()
    alone = [layer.weight.grad.sum().item() / (dist.get_rank() + 1) for layer in net]
    found, was_early, _ = sums.finish()
    assert not was_early
    return under_way, [found[layer.weight].sum().item() / one for layer, one in zip(net, alone, strict=True)]


def test_a_bucket_is_sent_off_as_soon_as_its_gradients_are_there():
    for under_way, factors in run_ranks(sent_off, 2):
        assert under_way == [1, 2, 3, 4]
        assert factors == pytest.approx([3.0] * 4)
