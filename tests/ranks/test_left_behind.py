"""What a step leaves behind: no tensors, no threads, no traces in random streams."""

import gc
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.testing import run_ranks

from .steps import STEPS, Net, batch, draws, one_after_the_other

MICROBATCHES = 2


def engine_for(module: nn.Module, pp: int = 2) -> Engine:
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=MICROBATCHES))
    engine.attach(module)
    return engine


def live_tensors(pp: int) -> tuple[list[int], list[int]]:
    """Tensors that are alive after each step, with the garbage collector off."""

    def step(part: dict[str, Tensor]) -> Any:
        loss = STEPS["glue_parameter"](net, part["x"])
        return {"loss": loss, "hidden": net.blocks[0](part["x"])}

    torch.manual_seed(0)
    net = Net(one_after_the_other)
    engine = engine_for(net, pp)
    gc.disable()
    counts = []
    for number in range(4):
        engine.train_step(step, batch(number), loss_of=lambda out: out["loss"])
        time.sleep(0.1)  # the threads of the microbatches end a moment later
        counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
        counts.append(sum(type(thing) is PlacedTensor for thing in gc.get_objects()))
    gc.enable()
    return counts[::2], counts[1::2]


@pytest.mark.parametrize("pp", [1, 2])
def test_nothing_of_a_step_stays_in_memory(pp):
    for tensors, placed in run_ranks(live_tensors, pp, pp):
        assert placed == [0] * 4
        assert tensors[1:] == [tensors[1]] * 3


def threads(_: int) -> int:
    import threading

    torch.manual_seed(0)
    net = Net(one_after_the_other)
    engine = engine_for(net)
    for number in range(5):
        engine.train_step(net.loss, batch(number), loss_of=lambda loss: loss)
    during = threading.active_count()
    engine.close()
    time.sleep(0.2)
    # The watch of the process group lives as long as that.
    assert [each.name for each in threading.enumerate()] in (["MainThread"], ["MainThread", "smp watch"])
    return during


def test_threads_are_reused_and_end_with_the_engine():
    # One for each microbatch, one for each message that it may wait for, and one for the end of the step.
    assert all(count <= 2 + 3 * MICROBATCHES for count in run_ranks(threads, 2, 0))


def outside_streams() -> list[float]:
    torch.manual_seed(0)
    random.seed(0)
    net = Net(draws)
    engine = engine_for(net)
    values = []
    for number in range(3):
        values += [torch.rand(()).item(), random.random()]
        engine.train_step(net.loss, batch(number), loss_of=lambda loss: loss)
    return values


def test_random_streams_outside_of_the_step_do_not_notice_it():
    first, second = run_ranks(outside_streams, 2)
    torch.manual_seed(0)
    Net(draws)
    random.seed(0)
    expected: list[float] = []
    for _ in range(3):
        expected += [torch.rand(()).item(), random.random()]
    assert first == second == expected
