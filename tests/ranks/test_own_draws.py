"""Numbers that each rank of a tensor-parallel group draws for itself in a step are told, and others are not."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import UnsupportedError
from smp_strategy.testing import run_ranks

WIDTH, SAMPLES, STEPS = 8, 4, 2
Draw = np.random.Generator
NOTHING = "nothing"


class Noisy(nn.Module):
    """A block with noise inside, of a generator that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.draw: Draw | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.draw is not None:
            x = x + torch.from_numpy(self.draw.normal(size=tuple(x.shape))).float()
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Noisy() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def target(net: Net, x: Tensor, draw: Draw) -> Tensor:
    return F.mse_loss(net(x), torch.from_numpy(draw.normal(size=tuple(x.shape))).float())


def number(net: Net, x: Tensor, draw: Draw) -> Tensor:
    return net(x).square().mean() * float(draw.uniform())


def place(net: Net, x: Tensor, draw: Draw) -> Tensor:
    return net(x)[draw.permutation(len(x))[:2].tolist()].square().mean()


def inside(net: Net, x: Tensor, draw: Draw) -> Tensor:
    """The layers behind it mix the ranks' numbers, so the loss is the same on all ranks."""
    net.blocks[0].draw = draw  # type: ignore[union-attr]
    return net(x).square().mean()


STEPS_THAT_DRAW: dict[Callable[[Net, Tensor, Draw], Tensor], str] = {
    target: "a call of `mse_loss`",
    number: "the computation of the loss",
    place: "the computation of the loss",
    inside: "a call of a split Linear",
}


def said(step: Callable[[Net, Tensor, Draw], Tensor], is_own: bool, num_steps: int) -> str:
    net = Net()
    engine = Engine(SMPConfig(tensor_parallel_degree=2, tensor_parallel={"*.up": "column", "*.down": "row"}))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine.attach(net, [optimizer])
    draw = np.random.default_rng(engine.mesh.tp_rank if is_own else 0)
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    try:
        for _ in range(num_steps):
            result = engine.train_step(lambda x: step(net, x, draw), x, loss_of=lambda loss: loss)
            result.commit(torch.ones(()), reduce=True)
            engine.begin_update(optimizer)
            optimizer.step()
            engine.end_update(optimizer)
        engine.detach()
    except UnsupportedError as error:
        return str(error)
    return NOTHING


def all_said(is_own: bool, num_steps: int) -> Sequence[str]:
    return [said(step, is_own, num_steps) for step in STEPS_THAT_DRAW]


@pytest.mark.parametrize("num_steps", [1, STEPS])
def test_draws_of_each_rank_are_told_by_the_next_step_or_the_end(num_steps: int) -> None:
    for found in run_ranks(all_said, 2, True, num_steps):
        for expected, message in zip(STEPS_THAT_DRAW.values(), found, strict=True):
            assert f"Ranks 0 and 1 are in {expected} with different inputs" in message


def test_draws_that_are_alike_are_no_error() -> None:
    for found in run_ranks(all_said, 2, False, STEPS):
        assert list(found) == [NOTHING] * len(STEPS_THAT_DRAW)
