"""Layers in a row, in an ordinary process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_strategy
from smp_strategy.activations.submodules import checkpoint_sequential
from smp_strategy.errors import ConfigError
from tests.unit.activations.calls import WIDTH, Mlp, gradients


class Splits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, y * 2


class Adds(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


class AddsAll(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        return pair[0] * pair[1]


@pytest.mark.parametrize("strategy", ["each", "group_2", "contiguous"])
def test_the_gradients_are_those_of_an_ordinary_call(strategy: str) -> None:
    found = []
    for call in (
        lambda layers, x: layers(x),
        lambda layers, x: smp_strategy.checkpoint_sequential(layers, x, strategy),
    ):
        torch.manual_seed(0)
        layers = nn.Sequential(Mlp(), nn.Dropout(0.5), Mlp())
        call(layers, torch.ones(2, WIDTH)).pow(2).sum().backward()
        found.append(gradients(layers))
    assert found[0] == found[1]


@pytest.mark.parametrize("strategy", ["each", "group_2", "contiguous"])
@pytest.mark.parametrize("packs", [True, False])
def test_a_tuple_is_the_arguments_of_the_next_layer_unless_it_is_packed(strategy: str, packs: bool) -> None:
    layers = nn.Sequential(Splits(), AddsAll() if packs else Adds())
    x = torch.ones(2, WIDTH)
    found = checkpoint_sequential(layers, x, strategy, pack_args_as_tuple=packs)
    assert torch.equal(found, layers[0](x)[0] * layers[0](x)[1])
    found.sum().backward()


def test_a_strategy_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ConfigError, match="each, contiguous or group_N with N from 1 on, but is 'all'"):
        checkpoint_sequential(nn.Sequential(), torch.ones(1), "all")
