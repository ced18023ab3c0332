import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smp_strategy.checkpoint.convert.contents import LazyTensor
from smp_strategy.checkpoint.convert.layouts import (
    add_prefix,
    add_tied,
    find_parameters,
    find_prefix,
    named_groups,
    numbered_groups,
    parameter_shapes,
    read_optimizer,
    strip_prefix,
)
from smp_strategy.errors import CheckpointError

SHAPES = [(2,), (3,), (2, 3)]


def ways(shapes, weights):
    """All ways, by trying all of them."""
    found = []
    for names in itertools.combinations(weights, len(shapes)):
        if all(shape in (None, weights[name]) for name, shape in zip(names, shapes, strict=True)):
            found.append(list(names))
    return found


@given(st.lists(st.sampled_from([None, *SHAPES]), max_size=4), st.lists(st.sampled_from(SHAPES), max_size=6))
def test_parameters_are_found_exactly_if_there_is_one_way(shapes, there):
    weights = {f"w{number}": shape for number, shape in enumerate(there)}
    every = ways(shapes, weights)
    assert find_parameters(shapes, weights) == (every[0] if len(every) == 1 else None)


def test_names_that_the_optimizer_has_saved_count_more_than_shapes():
    groups = [{"params": [0, 1], "param_names": ["b", "a"]}]
    assert named_groups(groups, {0: (2,), 1: (2,)}, {"a": (2,), "b": (2,)}) == ([["b", "a"]], False)


def test_two_groups_never_share_a_parameter():
    groups = [{"params": [0]}, {"params": [1]}]
    assert named_groups(groups, {0: (2,), 1: (2,)}, {"a": (2,)})[0] is None


def test_groups_get_numbers_as_pytorch_gives_them():
    groups = [{"params": ["b"], "lr": 1.0}, {"params": ["a", "c"], "lr": 2.0}]
    numbered, numbers = numbered_groups(groups)
    assert numbered == [{"params": [0], "lr": 1.0}, {"params": [1, 2], "lr": 2.0}]
    assert numbers == {"b": 0, "a": 1, "c": 2}


def trained(module, groups):
    optimizer = torch.optim.AdamW(groups)
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    weights = {name: LazyTensor.of(value) for name, value in module.state_dict().items()}
    return optimizer, weights


def lazy(state):
    kept = {
        number: {key: LazyTensor.of(value) for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": kept}


@pytest.mark.parametrize("with_names", [False, True])
def test_state_of_an_optimizer_with_decay_for_matrices_only_finds_its_names(with_names):
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    named = dict(module.named_parameters())
    pick = [[(n, p) if with_names else p for n, p in named.items() if (p.ndim > 1) == decays] for decays in (1, 0)]
    optimizer, weights = trained(module, [{"params": own} for own in pick])
    remarks = []
    found = read_optimizer(lazy(optimizer.state_dict()), parameter_shapes(weights), "optimizer", remarks)
    assert [group["params"] for group in found.groups] == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    assert bool(remarks) != with_names
    for name, parameter in named.items():
        assert found.state[name]["exp_avg"].read().equal(optimizer.state[parameter]["exp_avg"])


def test_state_that_could_be_that_of_buffers_is_left_out_and_said():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer, weights = trained(module, [{"params": list(module.parameters())}])
    remarks = []
    assert read_optimizer(lazy(optimizer.state_dict()), parameter_shapes(weights), "optimizer", remarks) is None
    assert "left out" in remarks[0]


def test_tied_parameters_are_one():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    optimizer, weights = trained(module, [{"params": list(module.parameters())}])
    found = read_optimizer(lazy(optimizer.state_dict()), parameter_shapes(weights), "optimizer", [])
    assert found.groups[0]["params"] == ["0.weight", "0.bias", "1.bias"]


def test_the_attribute_that_has_all_weights_is_the_prefix():
    assert find_prefix(["model.model.layers.0.weight", "model.model.norm.weight"]) == "model."
    assert find_prefix(["net._orig_mod.a.weight", "net._orig_mod.b"]) == "net._orig_mod."


def test_several_attributes_are_listed():
    with pytest.raises(CheckpointError, match=r"`model\.` \(2\), `loss\.` \(1\).*--prefix model\."):
        find_prefix(["model.a", "model.b", "loss.weight"])


def test_a_prefix_is_taken_away_and_put_in_front():
    weights = {"model.a": 1, "loss.weight": 2}
    assert strip_prefix(weights, "model.") == ({"a": 1}, ["loss.weight"])
    assert add_prefix({"a": 1}, "model.") == {"model.a": 1}
    with pytest.raises(CheckpointError, match=r"begins with `net\.`; there are `model\.a`"):
        strip_prefix(weights, "net.")


def test_names_of_tied_tensors_are_added():
    weight, other = torch.randn(3, 2), torch.randn(3, 2)
    like = {"embed": LazyTensor.of(weight), "body": LazyTensor.of(other), "head": LazyTensor.of(weight)}
    stored = LazyTensor((3, 2), torch.float32, lambda: weight)
    weights = {"head": stored, "body": LazyTensor((3, 2), torch.float32, lambda: other)}
    assert add_tied(weights, like) == ["`embed` was added: it is tied to `head`."]
    assert weights["embed"] is weights["head"]
    assert weights["embed"].memory is not None
    assert weights["embed"].read() is weight
    assert weights["body"].memory is None
    assert add_tied(weights, like) == []
