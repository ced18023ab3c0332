"""Training of four replicas or fewer, and of one process that adds up their gradients."""

from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine

__all__ = ["differing", "one_process", "trained"]

STEPS = 3


class Net(nn.Module):
    """Three layers, of which the last one is used by every other batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 70)
        self.middle = nn.Linear(70, 33)
        self.last = nn.Linear(33, 1)
        self.unused = nn.Linear(2, 2)

    def loss(self, batch: tuple[Tensor, bool]) -> Tensor:
        x, uses_last = batch
        x = self.middle(self.first(x).tanh())
        return (self.last(x) if uses_last else x).square().mean()


def batch(number: int) -> tuple[Tensor, bool]:
    torch.manual_seed(number)
    return torch.randn(4, 6), number % 2 == 0


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(options: dict[str, Any], overlaps: bool = True) -> tuple[Net, Engine]:
    """A model after some steps, each replica with batches of its own, and its engine."""
    model, optimizer = made()
    engine = Engine(SMPConfig(pipeline_parallel_degree=1, **options))
    engine.attach(model, [optimizer])
    for step in range(STEPS):
        data = batch(step * engine.mesh.dp + engine.mesh.dp_rank)
        result = engine.train_step(model.loss, data, loss_of=lambda loss: loss, reduces=overlaps)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    return model, engine


def one_process(ranks: int = 4, *, by_node: bool = False) -> dict[str, Tensor]:
    """Weights of one process that adds up the replicas' gradients in their order, or those of two nodes first."""
    model, optimizer = made()
    for step in range(STEPS):
        found: dict[nn.Parameter, list[Tensor]] = {}
        for replica in range(ranks):
            model.zero_grad()
            model.loss(batch(step * ranks + replica)).backward()
            for each in model.parameters():
                if each.grad is not None or each in found:
                    found.setdefault(each, [torch.zeros_like(each)] * replica)
                    found[each].append(torch.zeros_like(each) if each.grad is None else each.grad)
        model.zero_grad()
        for each, gradients in found.items():
            nodes = [gradients[: ranks // 2], gradients[ranks // 2 :]] if by_node else [gradients]
            each.grad = reduce(add, [reduce(add, node) for node in nodes]) * (1 / ranks)
        optimizer.step()
    return model.state_dict()


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]
