"""Pairs of layers that a look at one step has found, in code that does something else later, or learns in between."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.errors import ConfigError
from smp_strategy.tensor_parallel.plan.observed_pairs import read_by_others
from smp_strategy.tensor_parallel.split import split_layers
from smp_strategy.testing import run_ranks
from tests.ranks.split_layers import assert_close, cuts_of, group_of_all, random, same_parts


class Mlp(nn.Module):
    """With a learned number between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)
        self.scale = nn.Parameter(torch.tensor([0.7]))

    def features(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.features(x) * self.scale)


def twins(patterns: dict[str, str] | None = None) -> tuple[Mlp, Mlp, TensorGroup]:
    torch.manual_seed(0)
    group, dense = group_of_all(), Mlp()
    net = copy.deepcopy(dense)
    report = split_layers(net, group, patterns=patterns, run_step=lambda: net(random(2, 8))).report
    assert [line.name for line in report.lines if line.is_split] == ["up", "down"]
    return dense, net, group


def by_number_of_the_input(net: Mlp, x: Tensor) -> Tensor:
    return net.down(net.features(x) / x.std())


def normalized(net: Mlp, x: Tensor) -> Tensor:
    return net.down(F.layer_norm(net.features(x), (10,)))


def with_penalty(net: Mlp, x: Tensor) -> Tensor:
    h = net.features(x)
    return net.down(h) + h.pow(2).mean(-1, keepdim=True).sqrt()


def of_features(net: Mlp, x: Tensor) -> Tensor:
    return net.features(x)


def changed_in_place(net: Mlp, x: Tensor) -> Tensor:
    h = net.up(x[None])
    return net.down(F.relu(h, inplace=True))[0]


LATER = {
    "changed in place": changed_in_place,
    "the same": Mlp.forward,
    "a number of the input": by_number_of_the_input,
    "a norm": normalized,
    "a penalty": with_penalty,
    "features": of_features,
    "compiled": lambda net, x: torch.compile(net, backend="eager")(x),
}


@pytest.mark.parametrize("patterns", [None, {"up": "column", "down": "row"}], ids=["found", "named"])
@pytest.mark.parametrize("name", LATER)
def test_what_code_does_with_features_later_it_does_with_all_of_them(name, patterns):
    def on_rank():
        dense, net, group = twins(patterns)
        inputs = [random(3, 8, seed=1).requires_grad_() for _ in range(2)]
        results = [LATER[name](module, x) for module, x in zip((dense, net), inputs, strict=True)]
        towards = random(*results[0].shape, seed=2)
        for result in results:
            (result * towards).sum().backward()
        found = results[1].whole() if hasattr(results[1], "whole") else results[1]
        assert_close(found.detach(), results[0].detach())
        assert_close(inputs[1].grad, inputs[0].grad)
        same_parts(net, cuts_of(net), dense, group.rank)

    run_ranks(on_rank, 2)


def test_a_hook_that_is_added_later_sees_all_features():
    def on_rank():
        dense, net, _ = twins()
        norms = []
        for module in (dense, net):
            module.up.register_forward_hook(lambda layer, given, found: norms.append(found.detach().norm()))
            module(random(3, 8))
        assert_close(norms[1], norms[0])

    run_ranks(on_rank, 2)


def test_dropout_of_features_that_somebody_has_looked_at_is_the_same_on_all_ranks():
    def on_rank():
        _, net, group = twins()
        h = F.dropout(F.layer_norm(net.features(random(3, 8)), (10,)), 0.5)
        return h.tolist(), torch.rand(3).tolist()

    one, other = run_ranks(on_rank, 2)
    assert one == other


class Spectral(nn.Module):
    """A weight that changes a little whenever it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 10))
        self.down = nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def test_a_weight_that_is_computed_from_others_is_not_asked_for():
    def on_rank():
        torch.manual_seed(0)
        dense = Spectral()
        net = copy.deepcopy(dense)
        split = split_layers(net, group_of_all(), run_step=lambda: None)
        assert not any(line.is_split for line in split.report.lines)
        assert all(torch.equal(a, b) for a, b in zip(net.buffers(), dense.buffers(), strict=True))
        with pytest.raises(ConfigError, match="its weight is no parameter of its own, but computed from others"):
            split_layers(net, group_of_all(), patterns={"up": "column"})
        assert all(torch.equal(a, b) for a, b in zip(net.buffers(), dense.buffers(), strict=True))

    run_ranks(on_rank, 2)


def test_a_call_of_a_layer_is_no_use_of_its_weight_by_others():
    def on_rank():
        _, net, _ = twins()
        modules, x = dict(net.named_modules()), random(3, 8)
        assert read_by_others(modules, lambda: net.features(x)) == set()
        assert read_by_others(modules, lambda: net.up.weight.sum()) == {id(net.up.weight)}

    run_ranks(on_rank, 2)
