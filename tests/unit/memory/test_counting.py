"""What a rank holds, counted."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn, optim

from smp_strategy.memory.counting import NothingSpread, SpreadUnits, count
from smp_strategy.sharding.flat_unit import FlatUnit
from smp_strategy.stage_tensors import Home, Sight, StageTensor
from tests.unit.sharding.world import World

MESH: Any = SimpleNamespace(rank=3, stage=1)
NOTHING = NothingSpread()


def home(tensor: torch.Tensor, *holders: int) -> Home:
    stride = tuple(tensor.stride())
    return Home(name="w", holders=frozenset(holders), stage=1, kind=type(tensor), stride=stride, sight=Sight())


def trained(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_every_kind_is_counted():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = optim.AdamW(model.parameters())
    nbytes = 4 * (8 * 4 + 4 + 4 + 4)
    buffers = 4 * (4 + 4) + 8
    found = count(model, [optimizer], NOTHING, MESH)
    assert (found.rank, found.stage) == (3, 1)
    assert list(found.amounts.values()) == [nbytes, 0, 0, 0, buffers]
    trained(model, optimizer)
    found = count(model, [optimizer], NOTHING, MESH)
    assert list(found.amounts.values()) == [nbytes, 0, nbytes, 2 * nbytes + 4 * 4, buffers]
    assert found.total == sum(found.amounts.values())


def test_memory_that_tensors_share_counts_once_and_as_a_whole():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    flat = torch.zeros(100)
    model["a"].weight.data, model["b"].weight.data = flat[:16].view(4, 4), flat[16:32].view(4, 4)
    model.register_buffer("view", flat[90:])
    gradients = torch.ones(32)
    model["a"].weight.grad, model["b"].weight.grad = gradients[:16].view(4, 4), gradients[16:].view(4, 4)
    optimizer = optim.SGD(model.parameters(), 0.1)
    optimizer.state[model["a"].weight] = {"parts": [torch.ones(3), {"more": torch.ones(5), "again": flat}], "step": 1}
    assert list(count(model, [optimizer], NOTHING, MESH).amounts.values()) == [400, 0, 128, 32, 0]


def test_what_is_on_other_stages_or_on_the_meta_device_is_not_here():
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4, device="meta"))
    whole = count(model, [], NOTHING, MESH)
    StageTensor.send_away(model[0].weight, home(model[0].weight, 0))
    StageTensor.send_away(model[1].running_mean, home(model[1].running_mean, 0, 2))
    found = count(model, [], NOTHING, MESH)
    assert (whole.parameters, found.parameters) == (4 * 32, 0)
    assert whole.buffers - found.buffers == 4 * 4


def test_what_is_here_is_counted_also_while_a_hook_looks_at_it():
    model = nn.Linear(8, 4, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    StageTensor.watch(model.weight, home(model.weight, 1))
    found = count(model, [], NOTHING, MESH)
    assert (found.parameters, found.gradients) == (128, 128)


def test_parameters_that_are_spread_are_counted_by_their_units():
    model = nn.ModuleDict({"unit": nn.Linear(64, 64, bias=False), "glue": nn.Linear(8, 8, bias=False)})
    member = World(2).members[0]
    unit = FlatUnit([("weight", model["unit"].weight)], member, torch.device("cpu"))
    spread = SpreadUnits(units=[unit], parameters=[model["unit"].weight], most_gathered_bytes=4 * 64 * 64)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shard = 4 * 64 * 64 // 2
    assert list(count(model, [optimizer], spread, MESH).amounts.values()) == [shard + 256, 2 * shard, 0, 0, 0]
    with unit.pieces_shown():
        trained(model, optimizer)
    found = count(model, [optimizer], spread, MESH)
    assert list(found.amounts.values()) == [shard + 256, 2 * shard, shard + 256, shard + 256, 0]
