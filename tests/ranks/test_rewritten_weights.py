"""Layers that write to their own weights as they compute: in one place as in one process, in shards refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import UnsupportedError
from smp_strategy.testing import run_ranks


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Normalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[:4].copy_(F.normalize(self.weight[:4]))
        return super().forward(x)


class Exchanged(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = F.normalize(self.weight.data)
        return super().forward(x)


def hooked(wide: int, narrow: int) -> nn.Module:
    block = nn.Sequential(nn.Linear(wide, narrow))
    block[0].register_forward_pre_hook(shrink)
    return block


def shrink(layer: nn.Module, args: object) -> None:
    layer.weight.data.mul_(0.99)


LAYERS = {"clamped": Clamped, "normalized": Normalized, "exchanged": Exchanged, "hooked": hooked}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), LAYERS[kind](8, 8), nn.Linear(8, 8)])

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


BATCH = torch.linspace(-1, 1, 32).view(4, 8)


def trained(kind: str, evaluates: bool, options: dict[str, int]) -> dict[str, Tensor]:
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = Engine(SMPConfig(**{"pipeline_parallel_degree": 1, **options}))
    engine.attach(model, [optimizer])
    if evaluates:
        engine.eval_step(model.loss, BATCH)
    for _ in range(3):
        result = engine.train_step(model.loss, BATCH, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        optimizer.step()
    return copy.deepcopy(engine.saved.full_state_dict())


@pytest.mark.parametrize("kind", LAYERS)
def test_weights_are_those_of_one_process_where_one_stage_has_them(kind):
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(BATCH).backward()
        optimizer.step()
    found = run_ranks(trained, 2, kind, False, {"pipeline_parallel_degree": 2})[0]
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_shards_are_refused_before_the_first_step(kind, evaluates):
    name = "blocks.1.0.weight" if kind == "hooked" else "blocks.1.weight"

    def on_rank():
        with pytest.raises(UnsupportedError, match=f"`{name}` is written to by its own layer"):
            trained(kind, evaluates, {"sharded_data_parallel_degree": 2})

    run_ranks(on_rank, 2)
