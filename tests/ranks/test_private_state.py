"""Microbatches that take turns do not find each other's tensors in objects that they share."""

import functools
import re
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import PeerFailedError, UnsupportedError
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks

from .steps import WIDTH, Block

MICROBATCHES = 4


class Keeper(nn.Module):
    """Keeps what its blocks return. Each block runs twice, so that microbatches wait midway."""

    def __init__(self, prepare: Any, step: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.step = step
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.step(self, batch["x"])


def nothing(net: Keeper) -> None:
    pass


def attribute(net: Keeper, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    net.early = a(x)
    net.late = d(c(b(net.early)))
    net.late = c(b(a(net.late)))
    return (d(net.late) * net.early).mean() + net.late.pow(2).mean()


def with_hooks(collect: Any) -> Any:
    def prepare(net: Keeper) -> None:
        net.features = {}
        net.collected = []
        net.inside = SimpleNamespace(features={}, latest=None)
        net.ring = deque(maxlen=8)
        net.together = set()
        net.places = [None] * 4
        for number, block in enumerate(net.blocks):
            block.register_forward_hook(collect(net, number))

    return prepare


def fill_dict(net: Keeper, number: int) -> Any:
    return lambda module, inputs, output: net.features.__setitem__(f"block {number}", output)


def fill_list(net: Keeper, number: int) -> Any:
    return lambda module, inputs, output: net.collected.append(output)


def fill_object(net: Keeper, number: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        net.inside.latest = output if net.inside.latest is None else net.inside.latest + output
        net.inside.features[number] = (output, number)

    return hook


def fill_others(net: Keeper, number: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        net.ring.append(output)
        net.together.add(output)
        net.places[number] = output
        module.latest = output

    return hook


def use_dict(net: Keeper, x: Tensor) -> Tensor:
    out = net(x)
    return out.mean() + sum(feature.pow(2).mean() for feature in net.features.values())


def use_list(net: Keeper, x: Tensor) -> Tensor:
    out = net(x)
    assert len(net.collected) == 8
    loss = out.mean() + torch.stack(net.collected).pow(2).mean()
    net.collected.clear()
    return loss


def use_object(net: Keeper, x: Tensor) -> Tensor:
    out = net(x)
    loss = out.mean() + net.inside.latest.pow(2).mean()
    net.inside.latest = None
    return loss + sum(feature.mean() * number for feature, number in net.inside.features.values())


def use_others(net: Keeper, x: Tensor) -> Tensor:
    net.ring.clear()
    net.together.clear()
    out = net(x)
    assert len(net.ring) == len(net.together) == 8
    loss = out.mean() + net.ring[0].pow(2).mean() + sum(net.places[1:]).mean()
    return loss + net.blocks[2].latest.mean()


def with_closures(net: Keeper) -> None:
    dicts: dict[str, Tensor] = {}
    lists: list[Tensor] = []
    latest = None

    def by_name(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        dicts[name] = output

    def in_order(module: nn.Module, inputs: Any, output: Tensor, store: Any = lists) -> None:
        nonlocal latest
        store.append(output)
        latest = output

    net.blocks[0].register_forward_hook(functools.partial(by_name, "first"))
    net.blocks[2].register_forward_hook(functools.partial(by_name, "third"))
    for block in net.blocks:
        block.register_forward_hook(in_order)
    net.read = lambda: (dicts, lists, latest)


def use_closures(net: Keeper, x: Tensor) -> Tensor:
    out = net(x)
    dicts, lists, latest = net.read()
    assert len(lists) == 8
    loss = (dicts["first"] * dicts["third"]).mean() + (lists[1] - lists[3]).pow(2).mean() + (out * latest).mean()
    lists.clear()
    return loss


ACTIVATIONS: dict[int, Any] = {}


def fill_global(net: Keeper, number: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        ACTIVATIONS[number] = output

    return hook


def use_global(net: Keeper, x: Tensor) -> Tensor:
    return net(x).mean() + (ACTIVATIONS[0] * ACTIVATIONS[3]).mean()


def fresh_containers(net: Keeper, x: Tensor) -> Tensor:
    net.fresh, net.more = [], {}
    for block in [*net.blocks, *net.blocks]:
        x = block(x)
        net.fresh.append(x)
        net.more["latest"] = x
    return torch.stack(net.fresh).pow(2).mean() + net.more["latest"].mean()


def real_tensors(net: Keeper, x: Tensor) -> Tensor:
    net.mask = x > 0
    net.given = {"x": x}
    return (net(x) * net.mask).pow(2).mean() + (net(x) * net.given["x"]).mean()


WAYS = {
    "attribute": (nothing, attribute),
    "dict of a hook": (with_hooks(fill_dict), use_dict),
    "list of a hook": (with_hooks(fill_list), use_list),
    "object": (with_hooks(fill_object), use_object),
    "deque, set, places, unit": (with_hooks(fill_others), use_others),
    "closures": (with_closures, use_closures),
    "global": (with_hooks(fill_global), use_global),
    "fresh containers": (nothing, fresh_containers),
    "real tensors": (nothing, real_tensors),
}


def batch(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))}


def train(prepare: Any, step: Any, pp: int, **options: Any) -> tuple[Keeper, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = Keeper(prepare, step)
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=MICROBATCHES, **options))
    engine.attach(net)
    for number in range(3):
        net.zero_grad()
        engine.train_step(net.loss, batch(number), loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
    return net, {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def gradients_of(*args: Any) -> dict[str, Tensor]:
    return train(*args)[1]


def alone(prepare: Any, step: Any) -> tuple[Keeper, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = Keeper(prepare, step)
    for number in range(3):
        net.zero_grad()
        for part in split(batch(number), MICROBATCHES)[0]:
            (net.loss(part) / MICROBATCHES).backward()
    return net, {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_every_microbatch_finds_what_it_has_kept(way, pp):
    ACTIVATIONS.clear()
    merged: dict[str, Tensor] = {}
    for found in run_ranks(gradients_of, pp, *WAYS[way], pp):
        merged.update(found)
    _, expected = alone(*WAYS[way])
    assert merged.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(merged[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def bookkeeping(net: Keeper, x: Tensor) -> Tensor:
    net.calls += 1
    loss = net(x).pow(2).mean()
    net.outputs.append(loss.detach())
    net.grown = [*net.grown, loss.detach()]
    net.tags.append(len(net.tags))
    net.seen = net.seen + x.sum()
    net.last = x
    return loss


def prepare_bookkeeping(net: Keeper) -> None:
    net.calls, net.outputs, net.grown, net.tags, net.last = 0, [], [], [], None
    net.register_buffer("seen", torch.zeros(()))


def books(pp: int) -> Any:
    net, _ = train(prepare_bookkeeping, bookkeeping, pp)
    numbers = [[tensor.program.microbatch for tensor in kept] for kept in (net.outputs, net.grown)]
    return net.calls, net.tags, net.seen, net.last, *numbers


@pytest.mark.parametrize("pp", [2, 4])
def test_after_the_step_everything_is_as_if_one_microbatch_had_run_after_the_other(pp):
    expected, _ = alone(prepare_bookkeeping, bookkeeping)
    for calls, tags, seen, last, outputs, grown in run_ranks(books, pp, pp):
        assert (calls, tags) == (expected.calls, expected.tags)
        assert torch.allclose(seen, expected.seen)
        assert torch.equal(last, expected.last)
        assert outputs == grown == [0, 1, 2, 3] * 3


def running_sum(net: Keeper, x: Tensor) -> Tensor:
    net.total = net.total + net(x).pow(2).mean()
    return net.total


def late_running_sum(net: Keeper, x: Tensor) -> Tensor:
    loss = net(x).pow(2).mean()
    net.total = loss + net.total
    return loss


def refusal(step: Any) -> str:
    try:
        train(lambda net: setattr(net, "total", 0.0), step, 2)
    except UnsupportedError as error:
        return str(error)
    except PeerFailedError:
        return ""
    return "not refused"


@pytest.mark.parametrize("step", [running_sum, late_running_sum])
def test_a_running_sum_over_microbatches_is_refused_whenever_it_is_read(step):
    messages = {message for message in run_ranks(refusal, 2, step) if message}
    assert len(messages) == 1
    assert re.search(r"A tensor of microbatch \d is used in microbatch \d", messages.pop())


def mean_in_two_operations(net: Keeper, x: Tensor) -> Tensor:
    h = net(x)
    net.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h.pow(2).mean()


def sums_before_and_after(net: Keeper, x: Tensor) -> Tensor:
    net.mean += x.mean(0)
    h = net(x)
    net.mean *= 1 - 0.1 * float(h.detach().mean())
    return h.pow(2).mean()


def mean_in_one_operation(net: Keeper, x: Tensor) -> Tensor:
    h = net(x)
    net.mean.lerp_(h.detach().mean(0), 0.1)
    return h.pow(2).mean()


def count_before_and_after(net: Keeper, x: Tensor) -> Tensor:
    net.number += len(x)
    h = net(x)
    net.number += int(h.detach().mean() < 100)
    return h.pow(2).mean()


def with_buffers(net: Keeper) -> None:
    net.register_buffer("mean", torch.ones(WIDTH))
    net.register_buffer("number", torch.zeros((), dtype=torch.int64))


def changed_in_turns(step: Any) -> str:
    try:
        train(with_buffers, step, 2, skip_tracing=True)
    except UnsupportedError as error:
        return str(error)
    except PeerFailedError:
        return ""
    return "not refused"


@pytest.mark.parametrize("step", [mean_in_two_operations, sums_before_and_after])
def test_a_buffer_that_microbatches_would_change_in_turns_is_refused_if_nobody_has_looked_before(step):
    messages = {message for message in run_ranks(changed_in_turns, 2, step) if message}
    assert len(messages) == 1
    assert re.search(r"The buffer `mean` is changed in place more than once by microbatch \d", messages.pop())


def buffers_after(pp: int, step: Any) -> tuple[Tensor, Tensor]:
    net, *_ = train(with_buffers, step, pp)
    return net.mean, net.number


@pytest.mark.parametrize(
    "step", [mean_in_one_operation, count_before_and_after, mean_in_two_operations, sums_before_and_after]
)
@pytest.mark.parametrize("pp", [2, 4])
def test_a_buffer_that_each_microbatch_changes_has_the_values_of_one_process(pp, step):
    expected, _ = alone(with_buffers, step)
    for mean, number in run_ranks(buffers_after, pp, pp, step):
        assert torch.allclose(mean, expected.mean)
        assert number == expected.number
