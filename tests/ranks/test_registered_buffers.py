"""Buffers that units register, replace or take away in their first forward are afterwards as in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

WIDTH = 8


class Registers(nn.Module):
    """Registers its buffers late: hidden and persistent ones, also in a part without tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Module()
        self.register_buffer("start", torch.ones(()))
        self.register_buffer("empty", None)
        self.register_buffer("gone", torch.ones(2))
        self.register_buffer("shown", torch.ones(3), persistent=False)
        self.register_buffer("hidden", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)
            self.register_buffer("kept", torch.full((2,), 0.25))
            self.register_buffer("same", self.kept)
            self.table.register_buffer("cos", torch.linspace(0, 1, WIDTH))
            self.table.register_buffer("sin", torch.linspace(1, 0, WIDTH), persistent=False)
            self.start = None
            self.empty = torch.zeros(2)
            del self.gone
            self._non_persistent_buffers_set.discard("shown")
            self._non_persistent_buffers_set.add("hidden")
        return (self.linear(x) * self.scale * self.table.cos + self.table.sin).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Registers() for _ in range(4)])

    def loss(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def _registered(module: nn.Module) -> dict[str, Any]:
    return {
        name: ({key: each if each is None else each.tolist() for key, each in part._buffers.items()}, hidden)
        for name, part in module.named_modules()
        for hidden in [sorted(part._non_persistent_buffers_set)]
    }


def _data(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def one_process() -> tuple[dict[str, Any], list[str], bool]:
    torch.manual_seed(0)
    module = Net()
    module.loss(_data(0)).backward()
    return _registered(module), list(module.state_dict()), module.layers[3].kept is module.layers[3].same


def ranks(options: dict[str, Any]) -> tuple[dict[str, Any], list[str], bool, list[str]]:
    torch.manual_seed(0)
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(SMPConfig(**options))
    engine.attach(module, [optimizer])
    for step in range(2):
        optimizer.zero_grad()
        engine.train_step(module.loss, _data(step), loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
    saved = list(engine.saved.full_state_dict())
    engine.detach()
    engine.close()
    same = module.layers[3].kept is module.layers[3].same and module.layers[0].kept is module.layers[0].same
    return _registered(module), list(module.state_dict()), same, saved


LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "recomputed": {"pipeline_parallel_degree": 2, "microbatches": 2, "activation_checkpointing": "all"},
    "sdp2": {"sharded_data_parallel_degree": 2},
    "dp2": {},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_of_units_are_those_of_one_process(layout: str) -> None:
    registered, names, same = one_process()
    for rank, (found, in_state, is_same, saved) in enumerate(run_ranks(ranks, 2, LAYOUTS[layout])):
        assert found == registered
        assert sorted(in_state) == sorted(names)
        assert is_same == same
        assert sorted(saved) == (sorted(names) if rank == 0 else [])
