"""Steps, batches and modules that change between steps, and modules that hold units of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks

from .step_runs import MICROBATCHES, alone, engine_for, gradients
from .steps import WIDTH, Block, Net, batch, one_after_the_other

PATHS = [[0, 1, 2, 3], [0, 2], [1, 3], [3, 2, 1, 0], [2, 3], [0], [0, 1, 2, 3, 0, 3], [2, 0, 3, 1]]


def change_paths(pp: int, paths: list[list[int]], samples: list[int], mixed: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    state = {"path": paths[0], "calls": 0}

    def step(net: Net, x: Tensor) -> Tensor:
        path = state["path"]
        if mixed and x[0, 0] > 0:
            path = path[::-1]
        for index in path:
            x = net.blocks[index](x)
        return x.pow(2).mean()

    net = Net(step)
    engine = engine_for(net, pp, microbatches=4) if pp else None
    for number, (path, size) in enumerate(zip(paths, samples, strict=True)):
        state["path"] = path
        if engine is None:
            parts, sizes = split(batch(number, size), 4)
            for part, count in zip(parts, sizes, strict=True):
                (net.loss(part) * (count / sum(sizes))).backward()
        else:
            result = engine.train_step(net.loss, batch(number, size), loss_of=lambda loss: loss)
            result.commit(torch.ones(()), reduce=number == len(paths) - 1)
    return gradients(net)


@pytest.mark.parametrize("mixed", [False, True], ids=["all", "some"])
def test_the_path_may_change_between_steps_and_microbatches(mixed):
    expected = change_paths(0, PATHS, [8] * len(PATHS), mixed)
    merged: dict[str, Tensor] = {}
    for found in run_ranks(change_paths, 2, 2, PATHS, [8] * len(PATHS), mixed):
        merged.update(found)
    for name, gradient in expected.items():
        torch.testing.assert_close(merged[name], gradient, rtol=1e-5, atol=1e-7)


def test_the_batch_size_may_change_between_steps():
    sizes = [8, 3, 1, 10]
    expected = change_paths(0, [[0, 1, 2, 3]] * 4, sizes, False)
    merged: dict[str, Tensor] = {}
    for found in run_ranks(change_paths, 2, 2, [[0, 1, 2, 3]] * 4, sizes, False):
        merged.update(found)
    for name, gradient in expected.items():
        torch.testing.assert_close(merged[name], gradient, rtol=1e-5, atol=1e-7)


def pops_and_counts(pp: int) -> tuple[Any, ...]:
    """A step that takes its batch apart and changes a buffer of the glue."""

    def step(part: dict[str, Tensor]) -> Tensor:
        x = part.pop("x")
        x.mul_(2.0)
        net.count += 1
        return one_after_the_other(net, x)

    torch.manual_seed(0)
    net = Net(one_after_the_other)
    given = batch()
    result = engine_for(net, pp, microbatches=1).train_step(step, given, loss_of=lambda loss: loss)
    return result.loss.item(), net.count.item()


def test_the_dry_run_leaves_the_batch_and_the_buffers_of_the_glue_alone():
    torch.manual_seed(0)
    net = Net(one_after_the_other)
    expected = one_after_the_other(net, batch()["x"] * 2).item()
    assert run_ranks(pops_and_counts, 2, 2) == [(pytest.approx(expected, rel=1e-6), 1.0)] * 2


def unfreezes() -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = Net(one_after_the_other)
    net.blocks[0].requires_grad_(False)
    net.blocks[1].requires_grad_(False)
    engine = engine_for(net)
    for number in range(2):
        result = engine.train_step(net.loss, batch(number), loss_of=lambda loss: loss)
        net.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        net.requires_grad_(True)
    return gradients(net)


def test_frozen_blocks_may_be_unfrozen_between_steps():
    _, expected = alone(one_after_the_other, Block)
    merged: dict[str, Tensor] = {}
    for found in run_ranks(unfreezes, 2):
        merged.update(found)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], gradient) for name, gradient in expected.items())


class Head(nn.Module):
    """Calls a module that is also called on its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.mid = Block()
        self.head = Head(self.first)

    def loss(self, part: dict[str, Tensor]) -> Tensor:
        return self.head(self.mid(self.first(part["x"]))).pow(2).mean()


def nested(pp: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Nested()
    if pp:
        result = engine_for(module, pp).train_step(module.loss, batch(), loss_of=lambda loss: loss)
        result.commit(torch.ones(()), reduce=True)
    else:
        for part in split(batch(), MICROBATCHES)[0]:
            (module.loss(part) / MICROBATCHES).backward()
    return gradients(module)


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_unit_may_call_another_unit_that_it_holds(pp):
    expected = nested(0)
    merged: dict[str, Tensor] = {}
    for found in run_ranks(nested, pp, pp):
        merged.update(found)
    assert merged.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(merged[name], gradient, rtol=1e-5, atol=1e-7)


def copies_after_attach() -> tuple[float, float]:
    import copy

    torch.manual_seed(0)
    net = Net(one_after_the_other)
    engine = engine_for(net, 1)
    engine.train_step(net.loss, batch(), loss_of=lambda loss: loss)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    return other.loss(batch()).item(), batch()["x"].pow(2).mean().item()


def test_a_copy_of_the_model_computes_with_its_own_weights():
    ((found, expected),) = run_ranks(copies_after_attach, 1)
    assert found == pytest.approx(expected)
