"""What the user says of layers, and what becomes of it on real ranks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smp_strategy
from smp_strategy.errors import ConfigError
from smp_strategy.tensor_parallel.autograd_collectives import add_up
from smp_strategy.tensor_parallel.autograd_collectives import copy as copied
from smp_strategy.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from smp_strategy.tensor_parallel.split import split_layers
from smp_strategy.testing import run_ranks

from .split_layers import assert_close, group_of_all, random


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 10), nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Whose code has numbers of heads."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.qkv, self.o = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.attention, self.mlp, self.norm = Attention(), Mlp(), nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 6, 1)

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.attention(x)
        x = self.norm(x + self.mlp(x))
        return self.conv(x.transpose(1, 2))


def as_dense(patterns=None, notes=lambda net: None, looks=True, expected=()):
    """Whether a split net computes what the dense one does, and which layers are split."""
    torch.manual_seed(0)
    dense = Net()
    notes(dense)
    net = copy.deepcopy(dense)
    tokens = torch.arange(6).view(2, 3)
    group = group_of_all()
    split = split_layers(net, group, patterns=patterns, run_step=(lambda: net(tokens)) if looks else None)
    towards = random(2, 6, 3)
    for module in (dense, net):
        (module(tokens) * towards).sum().backward()
    assert_close(net(tokens).detach(), dense(tokens).detach())
    for (name, part), whole in zip(net.named_parameters(), dense.parameters(), strict=True):
        found = split.cuts[part].join(group.objects(part.grad)) if part in split.cuts else part.grad
        assert_close(found, whole.grad), name
    assert {line.name for line in split.report.lines if line.is_split} == set(expected), str(split.report)
    split.to_dense()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), dense.parameters(), strict=True))
    assert net.attention.num_heads == 4
    return str(split.report)


MLP = ("mlp.up", "mlp.gate", "mlp.down")
ATTENTION = {"*.qkv": "column", "*.o": "row", "*.num_heads": "heads"}
CASES = {
    "pairs found in the step": ({}, {"expected": MLP}),
    "without looking at the step": ({}, {"looks": False, "expected": ()}),
    "patterns that are known to be a pair": (
        {"*.up": "column", "*.gate": "column", "*.down": "row"},
        {"expected": MLP},
    ),
    "patterns of which nothing is known": ({"*.up": "column", "*.down": "row"}, {"looks": False, "expected": MLP[::2]}),
    "a pattern for one layer": ({"*.up": "row"}, {"looks": False, "expected": MLP[:1]}),
    "heads": (ATTENTION, {"looks": False, "expected": ("attention.qkv", "attention.o")}),
    "heads whose number is not named": (
        {"*.qkv": "column", "*.o": "row"},
        {"looks": False, "expected": ("attention.qkv", "attention.o")},
    ),
    "embedding by vocabulary": ({"table": "vocab"}, {"looks": False, "expected": ("table",)}),
    "embedding by columns": ({"table": "embedding"}, {"looks": False, "expected": ("table",)}),
    "convolution": ({"conv": "column"}, {"looks": False, "expected": ("conv",)}),
    "replicated": ({"mlp": "replicate"}, {"expected": ()}),
    "all": (
        {**ATTENTION, "table": "vocab", "conv": "row"},
        {"expected": (*MLP, "attention.qkv", "attention.o", "table", "conv")},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_that_are_named_are_split_and_nothing_changes(name):
    patterns, options = CASES[name]

    def on_rank():
        return as_dense(patterns, **options)

    run_ranks(on_rank, 2)


def test_the_report_says_how_each_layer_is_split_or_why_not():
    def on_rank():
        return as_dense(ATTENTION, expected=(*MLP, "attention.qkv", "attention.o"))

    one, other = run_ranks(on_rank, 2)
    assert one == other
    *table, remedy = one.splitlines()
    assert remedy.startswith("2 layers with matrices stay whole: each rank computes all of them. Name them in `ten")
    assert table == [
        "5 of 8 layers are split over 2 ranks",
        "layer          class      split                             why",
        "---------------------------------------------------------------",
        "table          Embedding  whole                             nothing says how to split it",
        "attention.qkv  Linear     by columns (3 fused, heads of 2)  pattern",
        "attention.o    Linear     by rows (heads of 2)              pattern",
        "mlp.up         Linear     by columns                        found in the step",
        "mlp.gate       Linear     by columns                        found in the step",
        "mlp.down       Linear     by rows                           found in the step",
        "norm           LayerNorm  whole                             has vectors only",
        "conv           Conv1d     whole                             nothing says how to split it",
    ]


def test_what_is_disabled_stays_whole():
    def on_rank():
        return as_dense(notes=lambda net: smp_strategy.set_tensor_parallelism(net.mlp, False))

    assert "disabled" in run_ranks(on_rank, 2)[0]


def raises(error, patterns=None, strict=False, module=None, run_step=None):
    net = Net() if module is None else module()
    before = [type(part) for part in net.modules()]
    with pytest.raises(ConfigError) as caught:
        split_layers(net, group_of_all(), patterns=patterns, strict=strict)
    assert any(error in problem for problem in caught.value.problems), caught.value.problems
    assert [type(part) for part in net.modules()] == before
    return list(caught.value.problems)


def test_strict_names_every_layer_that_stays_whole():
    problems = run_ranks(raises, 2, "`mlp.up` (Linear) is not split", {"table": "replicate"}, True)[0]
    assert len(problems) == 6
    assert (
        "nothing says how to split it. Name it in `tensor_parallel`: `replicate` if it is to stay whole." in problems[0]
    )


def satisfied():
    patterns = {"attention": "replicate", "table": "replicate", "conv": "replicate"}
    tokens = torch.arange(6).view(2, 3)
    torch.manual_seed(0)
    net = Net()
    split_layers(net, group_of_all(), patterns=patterns, strict=True, run_step=lambda: net(tokens))


def test_strict_is_content_with_what_the_user_keeps_whole():
    run_ranks(satisfied, 2)


def test_a_pattern_that_names_what_cannot_be_split_is_an_error():
    error = "`tensor_parallel` names `norm`, which cannot be split: `norm` is a LayerNorm"
    run_ranks(raises, 2, error, {"norm": "column"})


class Odd(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class WithOdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Odd(4, 4)


def test_a_layer_that_refuses_leaves_nothing_half_split():
    error = "names `second`, which cannot be split: `second`: Odd has a forward of its own"
    run_ranks(raises, 2, error, {"first": "column", "second": "row"}, False, WithOdd)


def disagree():
    group = group_of_all()
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with pytest.raises(ConfigError, match="would split layers differently"):
        split_layers(net, group, patterns={"0": "column"} if group.rank else {})


def test_ranks_that_would_split_differently_say_so_and_do_not_wait():
    run_ranks(disagree, 2)


class SplitMlp(nn.Module):
    """A twin: the same names, smaller layers, a sum at the end."""

    def __init__(self, width, hidden, group):
        super().__init__()
        self.group = group
        self.up, self.down = nn.Linear(width, hidden // group.size), nn.Linear(hidden // group.size, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x, factor):
        self.calls += 1
        return {"result": add_up(self.down(self.up(copied(x, self.group)).relu()), self.group) + factor * self.bias}


@smp_strategy.tp_register(
    SplitMlp,
    lambda width, *, ratio: ((width, ratio * width), {}),
    lambda x: ((x, 1.0), {}),
    lambda found: found["result"],
)
class Registered(nn.Module):
    def __init__(self, width, *, ratio):
        super().__init__()
        self.up, self.down = nn.Linear(width, ratio * width), nn.Linear(ratio * width, width, bias=False)
        self.bias = nn.Parameter(torch.ones(width))
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.down(self.up(x).relu()) + self.bias


def twin():
    torch.manual_seed(0)
    dense = nn.Sequential(Registered(4, ratio=2), nn.LayerNorm(4))
    net = copy.deepcopy(dense)
    layer, names = net[0], list(dict(net.named_parameters()))
    parameters = list(net.parameters())
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(module))
    group = group_of_all()
    state = torch.get_rng_state()
    split = split_layers(net, group)
    assert torch.equal(torch.get_rng_state(), state)
    assert net[0] is layer
    assert isinstance(layer, Registered)
    assert list(dict(net.named_parameters())) == names
    assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
    assert layer.up.weight.shape == (4, 4)
    x = random(3, 4)
    for module in (dense, net):
        module(x).sin().sum().backward()
    assert_close(net(x).detach(), dense(x).detach())
    assert seen == [layer] * 2
    assert layer.calls == dense[0].calls == 2
    for part, whole in zip(net.parameters(), dense.parameters(), strict=True):
        found = split.cuts[part].join(group.objects(part.grad)) if part in split.cuts else part.grad
        assert_close(found, whole.grad)
    assert "registered: SplitMlp" in str(split.report)
    split.to_dense()
    assert type(layer) is Registered
    assert torch.equal(net(x), dense(x))


def test_a_registered_class_is_replaced_by_its_twin_with_its_values_and_names():
    run_ranks(twin, 2)


class NotAPart(nn.Module):
    def __init__(self, width, *, ratio):
        super().__init__()
        self.up, self.down = nn.Linear(width, 3), nn.Linear(3, width, bias=False)
        self.bias = nn.Parameter(torch.ones(width))
        self.calls = nn.Buffer(torch.zeros(()))


class Nameless(nn.Linear):
    def __init__(self, width, *, ratio):
        super().__init__(width, width)


def misfit(dist_module, reason):
    class Mine(Registered):
        pass

    before = Mine(4, ratio=2)
    smp_strategy.tp_register_with_module(Mine, dist_module)
    for net, expected in ((Mine(4, ratio=2), reason), (before, "it was built before its class Mine was registered")):
        split = split_layers(nn.Sequential(net), group_of_all())
        assert expected in str(split.report), str(split.report)
        assert net.up.weight.shape == (8, 4)


@pytest.mark.parametrize(
    ("dist_module", "reason"),
    [
        (NotAPart, "the parameter up.weight of NotAPart has 3 of 8 elements along dim 0, but this rank's part is 4"),
        (Nameless, "the parameters ['down.weight', 'up.bias', 'up.weight', 'weight'] are of Mine or Nameless only"),
    ],
)
def test_a_twin_that_does_not_fit_is_a_reason(dist_module, reason):
    run_ranks(misfit, 2, dist_module, reason)


def test_only_classes_of_modules_can_be_registered():
    with pytest.raises(ConfigError, match="`dist_module` must be a class of modules, but is 3"):
        smp_strategy.tp_register(3)(Registered)


def own_layers():
    class Up(nn.Linear):
        pass

    smp_strategy.tp_register_with_module(Up, ColumnParallelLinear)
    net = nn.Sequential(Up(4, 8))
    split = split_layers(net, group_of_all())
    assert isinstance(net[0], Up)
    assert isinstance(net[0], ColumnParallelLinear)
    assert not isinstance(net[0], RowParallelLinear)
    split.to_dense()
    assert type(net[0]) is Up


def test_layers_of_this_package_can_be_registered_as_twins():
    run_ranks(own_layers, 2)


def one_rank():
    net = Net()
    split = split_layers(net, group_of_all(), patterns={"*.up": "column"}, strict=True)
    assert not split.cuts
    assert type(net.mlp.up) is nn.Linear


def test_on_one_rank_nothing_is_split():
    run_ranks(one_rank, 1)
