"""Runs of small steps by an engine, and by one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline.microbatch import split

from .steps import Net, batch

MICROBATCHES = 2


def engine_for(module: nn.Module, pp: int = 2, **options: Any) -> Engine:
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, **{"microbatches": MICROBATCHES, **options}))
    engine.attach(module)
    return engine


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def train(step: Any, block: Any, pp: int, options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = Net(step, block)
    engine = engine_for(net, pp, **options)
    for number in range(2):  # the second step runs under a plan in any case
        net.zero_grad()
        result = engine.train_step(net.loss, batch(number), loss_of=lambda loss: loss)
        result.commit(torch.ones(()), reduce=True)
    return result.loss.item(), gradients(net)


def alone(step: Any, block: Any) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = Net(step, block)
    total = 0.0
    for part in split(batch(1), MICROBATCHES)[0]:
        loss = net.loss(part) / MICROBATCHES
        loss.backward()
        total += loss.item()
    return total, gradients(net)


def assert_as_alone(expected: tuple[float, dict[str, Tensor]], results: list[Any]) -> None:
    merged: dict[str, Tensor] = {}
    for loss, found in results:
        assert loss == pytest.approx(expected[0], rel=1e-6)
        merged.update(found)
    assert merged.keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(merged[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
