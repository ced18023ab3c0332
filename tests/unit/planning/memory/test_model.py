"""Memory model, against the bytes of real flat buffers and optimizers."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn, optim

from smp_strategy.data_parallel.flat_unit import FlatUnit, ShardPolicy
from smp_strategy.model.units import choose_units
from smp_strategy.planning.memory.model import ModelMemory, ShardingOf, holdings_of
from smp_strategy.planning.memory.sharded import FlatGroup, flat_groups
from smp_strategy.planning.partition.problem import HeldBytes, PartitionProblem, Setting, chain_of, problem_of
from tests.parity.models import MODELS, Text
from tests.pieces import pieces_shown
from tests.unit.data_parallel.world import World


def held_by(
    model: nn.Module,
    *optimizers: optim.Optimizer,
    spreading: ShardingOf | None = None,
    num_stages: int = 2,
    used_by_glue: Sequence[Tensor] = (),
) -> ModelMemory:
    units = choose_units(model, num_stages)
    return holdings_of(model, units, spreading or ShardingOf(), optimizers=optimizers, used_by_glue=used_by_glue)


def held(model: nn.Module, *optimizers: optim.Optimizer) -> dict[str, HeldBytes]:
    """By name of the unit."""
    found = held_by(model, *optimizers)
    assert {name: HeldBytes.sum_of(mine.values()) for name, mine in found.by_unit.items()} == found.whole
    return dict(found.whole)


def problem(holdings: ModelMemory, num_stages: int, state_shards: int = 1) -> PartitionProblem:
    setting = Setting.plain(num_stages, state_shards=state_shards)
    trace, work = chain_of({name: whole.parameter for name, whole in holdings.whole.items()})
    return problem_of(trace, work, holdings.by_unit, setting, everywhere=holdings.everywhere, whole=holdings.whole)


def test_optimizers_say_what_they_keep_of_each_unit():
    model = Text()
    size = 4 * 32 * 16
    assert held(model, torch.optim.SGD(model.parameters(), 0.1))["head"] == HeldBytes(size, size, 0)
    assert held(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))["head"] == HeldBytes(size, size, size)
    steps = 4
    assert held(model, torch.optim.Adam(model.parameters()))["head"] == HeldBytes(
        size, size, 2 * size + steps, updating=2 * size
    )


def test_frozen_parameters_have_no_gradient_and_those_in_no_optimizer_no_state():
    model = Text()
    model.embed.requires_grad_(False)
    size = 4 * 32 * 16
    found = held(model, torch.optim.Adam(model.blocks.parameters()))
    assert found["embed"] == HeldBytes(size)
    assert found["head"] == HeldBytes(size, size)
    assert found["blocks.0"].optimizer > found["blocks.0"].parameter


def test_without_any_optimizer_two_moments_are_assumed():
    size = 4 * 32 * 16
    assert held(Text())["head"] == HeldBytes(size, size, 2 * size)


def test_what_code_above_the_units_computes_with_is_on_every_stage_and_counts_once():
    model = Text()
    optimizer = optim.SGD(model.parameters(), 0.1)
    position, embedding = model.position.nbytes, model.embed.weight.nbytes
    assert list(held_by(model, optimizer).everywhere.values()) == [HeldBytes(position, position)]
    found = held_by(model, optimizer, used_by_glue=[model.embed.weight])
    assert sorted(found.everywhere.values()) == sorted([HeldBytes(position, position), HeldBytes(embedding, embedding)])
    stage_of = {name: int(name not in ("embed", "blocks.0")) for name in found.by_unit}
    total = sum(parameter.nbytes for parameter in model.parameters())
    first, second = (stage.parameter for stage in problem(found, 2).held(stage_of))
    assert first == position + embedding + sum(each.nbytes for each in model.blocks[0].parameters())
    assert first + second == total + position + embedding


def test_state_that_is_dealt_out_is_that_of_the_fullest_replica():
    model = nn.ModuleDict({"large": nn.Linear(64, 64, bias=False), "small": nn.Linear(8, 8, bias=False)})
    large, small = (4 * size for size in (64 * 64, 8 * 8))
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = held_by(model, optimizer, num_stages=1)
    stage_of = dict.fromkeys(found.by_unit, 0)
    for replicas, fullest in ((1, large + small), (2, large), (4, large)):
        (held,) = problem(found, 1, replicas).held(stage_of)
        assert held == HeldBytes(large + small, large + small, fullest)


OPTIMIZERS = {
    "AdamW": optim.AdamW,
    "momentum": lambda parameters: optim.SGD(parameters, 0.1, momentum=0.9),
    "plain": lambda parameters: optim.SGD(parameters, 0.1),
}


class Ranks:
    """A shard group in one process: each rank has a model of its own, and its share of each group of parameters."""

    def __init__(self, models: Sequence[nn.Module], groups: Sequence[FlatGroup], threshold: int) -> None:
        self.models = models
        self.parameters = [list(model.parameters()) for model in models]
        members = World(len(models)).members
        self.units = {
            group.number: [
                FlatUnit(
                    [(str(number), parameters[number]) for number in group.parameters],
                    member,
                    torch.device("cpu"),
                    keeping=ShardPolicy(persistence_threshold=threshold),
                )
                for parameters, member in zip(self.parameters, members, strict=True)
            ]
            for group in groups
        }

    def gather(self) -> None:
        for units in self.units.values():
            for unit in units:
                unit.gather()
            for unit in units:
                unit.wait()

    def reduce(self) -> None:
        for parameter in (each for parameters in self.parameters for each in parameters if each.requires_grad):
            parameter.grad = torch.ones_like(parameter)
        for units in self.units.values():
            for unit in units:
                unit.reduce()

    def step(self, optimizers: Sequence[optim.Optimizer]) -> None:
        for units in self.units.values():
            for unit, optimizer in zip(units, optimizers, strict=True):
                with pieces_shown(unit):
                    optimizer.step()
                unit.begin_gradients()

    def state_bytes(self, optimizers: Sequence[optim.Optimizer], group: FlatGroup) -> list[int]:
        return [
            sum(state.nbytes for number in group.parameters for state in optimizer.state[parameters[number]].values())
            for parameters, optimizer in zip(self.parameters, optimizers, strict=True)
        ]


@pytest.mark.parametrize("threshold", [0, 100, 10**6])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", ["text", "text, tied", "gpt2", "vit"])
def test_a_rank_of_a_shard_group_holds_what_was_said_to_the_byte(name, degree, kind, threshold):
    models = [MODELS[name]() for _ in range(degree)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    numbers = {id(parameter): number for number, parameter in enumerate(models[0].parameters())}
    groups = flat_groups(
        {unit.name: [numbers[id(each)] for each in unit.module.parameters()] for unit in choose_units(models[0], 2)}
    )
    spreading = ShardingOf(degree=degree, persistence_threshold=threshold, gathers_once=True, num_stages=2)
    found = held_by(models[0], optimizers[0], spreading=spreading)
    said = {number: held for mine in found.by_unit.values() for number, held in mine.items()}
    ranks = Ranks(models, groups, threshold)
    assert said.keys() == ranks.units.keys()
    for number, units in ranks.units.items():
        assert {unit.held_bytes for unit in units} == {said[number].parameter}
    ranks.gather()
    for number, units in ranks.units.items():
        assert {unit.held_bytes for unit in units} == {said[number].parameter + said[number].gathered}
    ranks.reduce()
    for number, units in ranks.units.items():
        shards = [sum(shard.nbytes for shard in unit.gradient_shards) for unit in units]
        assert set(shards) == {said[number].gradient}
    ranks.step(optimizers)
    for group in groups:
        assert max(ranks.state_bytes(optimizers, group)) == said[group.number].optimizer


def test_of_a_unit_that_the_code_above_uses_too_that_parameter_stays_whole():
    model = Text(tied=True)
    optimizer = optim.SGD(model.parameters(), 0.1)
    spreading = ShardingOf(degree=2, gathers_once=True, num_stages=2)
    found = held_by(model, optimizer, spreading=spreading, used_by_glue=[model.embed.weight])
    whole = HeldBytes(model.embed.weight.nbytes, model.embed.weight.nbytes)
    number = [each is model.embed.weight for each in model.parameters()].index(True)
    assert found.by_unit["embed"] == found.by_unit["head"] == {number: whole}
    assert found.everywhere[number] == whole


def test_a_file_with_the_partition_has_whole_units_whatever_the_degree():
    model = Text()
    whole = {degree: held_by(model, spreading=ShardingOf(degree=degree)).whole for degree in (1, 2)}
    assert whole[1] == whole[2]
