"""Measured memory of a rank."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn, optim

from smp_strategy.data_parallel.gather_schedule import GatherPolicy
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.model.guarded_tensors import watch
from smp_strategy.model.ownership import HomeStages, HookAccess, send_away
from smp_strategy.planning.memory.counting import count
from tests.unit.data_parallel.world import World

MESH: Any = SimpleNamespace(rank=3, stage=1)


def home(tensor: torch.Tensor, *holders: int) -> HomeStages:
    stride = tuple(tensor.stride())
    return HomeStages(name="w", holders=frozenset(holders), stage=1, stride=stride, sight=HookAccess())


def trained(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_every_kind_is_counted():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = optim.AdamW(model.parameters())
    nbytes = 4 * (8 * 4 + 4 + 4 + 4)
    buffers = 4 * (4 + 4) + 8
    found = count(model, [optimizer], MESH)
    assert (found.rank, found.stage) == (3, 1)
    assert list(found.amounts.values()) == [nbytes, 0, 0, 0, buffers]
    trained(model, optimizer)
    found = count(model, [optimizer], MESH)
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
    assert list(count(model, [optimizer], MESH).amounts.values()) == [400, 0, 128, 32, 0]


def test_what_is_on_other_stages_or_on_the_meta_device_is_not_here():
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4, device="meta"))
    whole = count(model, [], MESH)
    send_away(model[0].weight, home(model[0].weight, 0))
    send_away(model[1].running_mean, home(model[1].running_mean, 0, 2))
    found = count(model, [], MESH)
    assert (whole.parameters, found.parameters) == (4 * 32, 0)
    assert whole.buffers - found.buffers == 4 * 4


def test_what_is_here_is_counted_also_while_a_hook_looks_at_it():
    model = nn.Linear(8, 4, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    watch(model.weight, home(model.weight, 1))
    found = count(model, [], MESH)
    assert (found.parameters, found.gradients) == (128, 128)


def test_parameters_that_are_spread_are_counted_by_who_spreads_them():
    model = nn.ModuleDict({"unit": nn.Linear(64, 64), "glue": nn.Linear(8, 8, bias=False)})
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    members, timing = model["unit"].named_parameters(), GatherPolicy(gathers_once=False, reduces_early=True)
    spread = ShardedModule({("unit",): members}, World(2).members[0], None, torch.device("cpu"), timing=timing)
    layout, glue = spread.units["unit"].layout, 4 * 8 * 8
    assert list(count(model, [optimizer], MESH, spread).amounts.values()) == [layout.shard_bytes + glue, 0, 0, 0, 0]
    spread.show_pieces(model.parameters())
    trained(model, optimizer)
    numel = sum(parameter.numel() for parameter in model["unit"].parameters())
    spread.hide_pieces()
    found = count(model, [optimizer], MESH, spread)
    assert list(found.amounts.values()) == [layout.shard_bytes + glue, 0, 4 * numel + glue, 4 * numel + glue, 0]
    assert 0 < numel <= layout.shard_bytes / 4
