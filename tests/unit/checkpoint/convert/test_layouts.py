import pytest
import torch

from smp_strategy.checkpoint.convert.contents import LazyTensor
from smp_strategy.checkpoint.convert.layouts import contents_of
from smp_strategy.errors import CheckpointError


def lazy(value=1.0):
    return LazyTensor.of(torch.full((2,), value))


def opened(tree, **options):
    return contents_of(tree, kind="file", source="x.pt", **options)


WEIGHTS = {"a.weight": lazy(), "a.bias": lazy()}
STATE = {"state": {0: {"exp_avg": lazy()}, 1: {"exp_avg": lazy()}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}


@pytest.mark.parametrize(
    "tree",
    [
        WEIGHTS,
        {"model": WEIGHTS},
        {"module": WEIGHTS, "epoch": 3},
        {"state_dict": WEIGHTS, "ema": {"state_dict": {"b": lazy()}}},
        {"my_network": WEIGHTS},
        {"app": {"model": WEIGHTS, "optim": STATE}},
        {"app": {"model": {"a": {"weight": lazy(), "bias": lazy()}}}},
    ],
)
def test_weights_are_found_where_scripts_put_them(tree):
    assert list(opened(tree).weights) == ["a.weight", "a.bias"]


@pytest.mark.parametrize("key", ["optimizer", "optim", "optimizer_state_dict", "optimizer_0"])
def test_optimizers_are_found_where_scripts_put_them(key):
    found = opened({"model": WEIGHTS, key: STATE, "epoch": 3})
    assert [group["params"] for group in found.optimizers[0].groups] == [["a.weight", "a.bias"]]
    assert found.remarks[-1].startswith("epoch: left out")
    assert found.rest == {}


def test_lists_of_optimizers_keep_their_order():
    states = [STATE, {"state": {}, "param_groups": [{"params": [0, 1], "lr": 0.2}]}]
    found = opened({"state_dict": WEIGHTS, "optimizer_states": states, "pytorch-lightning_version": "2"})
    assert [optimizer.groups[0]["lr"] for optimizer in found.optimizers] == [0.1, 0.2]
    assert found.rest == {"pytorch-lightning_version": "2"}


def test_an_optimizer_without_names_takes_later_ones_with_it():
    unknown = {"state": {}, "param_groups": [{"params": [0], "lr": 0.2}]}
    found = opened({"state_dict": WEIGHTS, "optimizer_states": [unknown, STATE], "pytorch-lightning_version": "2"})
    assert found.optimizers == []
    assert "`optimizer_states[1]` was left out, too." in found.remarks


def test_a_key_says_where_the_weights_are():
    tree = {"model": WEIGHTS, "ema": {"best": {"b": lazy(2.0)}}}
    assert list(opened(tree, weights_at="ema.best").weights) == ["b"]
    with pytest.raises(CheckpointError, match=r"no weights under `ema\.worst`. There are: model, ema"):
        opened(tree, weights_at="ema.worst")


@pytest.mark.parametrize("tree", [{}, {"epoch": 3}, {"one": WEIGHTS, "two": WEIGHTS}, {"optimizer": STATE}])
def test_what_has_no_weights_is_refused(tree):
    with pytest.raises(CheckpointError, match="--weights KEY"):
        opened(tree)


def test_lists_that_were_stored_as_dicts_are_lists_again():
    state = {"state": {"a.weight": {"history": {"#0": lazy(0.0), "#1": lazy(1.0)}}}, "param_groups": []}
    state["param_groups"] = [{"params": ["a.weight"]}]
    found = opened({"state_dict": WEIGHTS, "optimizer_0": state})
    assert [tensor.read()[0].item() for tensor in found.optimizers[0].state["a.weight"]["history"]] == [0.0, 1.0]
