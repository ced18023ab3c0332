"""What the user says about units: what stays whole, and that they are compiled."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_strategy
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import ConfigError
from smp_strategy.testing import run_ranks

from .step_runs import alone, assert_as_alone, engine_for, gradients, train
from .steps import Block, Net, batch, one_after_the_other


class Pair(nn.Module):
    """Two blocks, which the rules would take for two units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def stages_of_pairs(mark: bool, unit_classes: list[str]) -> dict[str, int]:
    net = Net(one_after_the_other, Pair)
    for pair in net.blocks:
        if mark:
            assert smp_strategy.unit(pair) is pair
    engine = Engine(SMPConfig.from_options(pipeline_parallel_degree=4, unit_classes=unit_classes))
    engine.attach(net)
    engine.train_step(net.loss, batch(), loss_of=lambda loss: loss)
    assert engine.partition is not None
    return dict(engine.partition.stage_of)


@pytest.mark.parametrize(("mark", "unit_classes"), [(True, []), (False, ["Pair"]), (False, [f"{__name__}.Pair"])])
def test_what_is_marked_stays_whole(mark, unit_classes):
    for found in run_ranks(stages_of_pairs, 4, mark, unit_classes):
        assert found == {f"blocks.{number}": number for number in range(4)}


def refused(unit_classes: list[str]) -> str:
    try:
        stages_of_pairs(False, unit_classes)
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_class_that_the_model_does_not_have_is_refused_with_the_nearest():
    for message in run_ranks(refused, 4, ["Pear"]):
        assert "names ['Pear'], but the model has no module of such a class. Did you mean 'Pair'?" in message


def compiled() -> tuple[dict[str, Any], int]:
    warnings.simplefilter("ignore")  # what torch.compile itself causes in torch
    torch.manual_seed(0)
    net = Net(one_after_the_other)
    engine = engine_for(net, 2, compile=True)
    for number in range(2):
        net.zero_grad()
        engine.train_step(net.loss, batch(number), loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
    return gradients(net), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.one_in(3)
def test_units_are_compiled():
    _, expected = alone(one_after_the_other, Block)
    merged: dict[str, Tensor] = {}
    for found, num_graphs in run_ranks(compiled, 2, timeout=110):
        merged.update(found)
        assert num_graphs >= 1
    for name, gradient in expected.items():
        torch.testing.assert_close(merged[name], gradient, rtol=1e-5, atol=1e-6)


def takes_a_weight(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    return (d(c(b(a(x)))) + d(a.mlp[0].bias)).pow(2).mean()


class WithTable(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(4).flip(0))


def takes_a_table(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    return (d(c(b(a(x)))).index_select(1, a.order) + a(x).index_select(1, d.order)).pow(2).mean()


def test_the_glue_may_use_a_table_of_a_unit():
    assert_as_alone(alone(takes_a_table, WithTable), run_ranks(train, 2, takes_a_table, WithTable, 2, {}))


def test_a_weight_of_one_unit_may_be_the_argument_of_another():
    assert_as_alone(alone(takes_a_weight, Block), run_ranks(train, 2, takes_a_weight, Block, 2, {}))
