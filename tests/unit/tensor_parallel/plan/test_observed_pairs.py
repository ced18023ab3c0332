import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp_strategy.tensor_parallel.plan.observed_pairs import Pair, pair_blocks, watch


class Net(nn.Module):
    """Two linear layers, and what a test wants to happen between them."""

    def __init__(self, between=lambda net, h: h.relu()):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))
        self.kept = None
        self.between = between

    def forward(self, x):
        return self.down(self.between(self, self.up(x)))


def pairs_of(net, step=None):
    modules = dict(net.named_modules(remove_duplicate=False))
    return list(watch(modules, step or (lambda: net(torch.randn(3, 4)))).pairs)


@pytest.mark.parametrize(
    "between",
    [
        lambda net, h: h,
        lambda net, h: F.gelu(h, approximate="tanh"),
        lambda net, h: nn.SiLU()(h),
        lambda net, h: F.dropout(h.relu_(), 0.5),
        lambda net, h: h * torch.sigmoid(1.702 * h),
        lambda net, h: 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * torch.pow(h, 3.0)))),
        lambda net, h: -h / 2 + 1,
        lambda net, h: h * torch.tensor(2.0),
        lambda net, h: h.to(torch.float64).float() if h.is_floating_point() and h.dim() == 2 else h,
    ],
)
def test_linear_elementwise_linear_is_a_pair(between):
    assert pairs_of(Net(between)) == [Pair(("up",), "down")]


def test_several_first_layers_may_meet_on_the_way():
    class Gated(Net):
        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    assert pairs_of(Gated()) == [Pair(("gate", "up"), "down")]


@pytest.mark.parametrize(
    "between",
    [
        lambda net, h: F.layer_norm(h, (6,)),
        lambda net, h: h.softmax(-1),
        lambda net, h: h * net.scale,
        lambda net, h: h + torch.ones(6),
        lambda net, h: h.flip(-1),
        lambda net, h: h.view(-1, 6),
        lambda net, h: h / h.shape[-1],
        lambda net, h: h / h.size(-1),
        lambda net, h: h * h.sum(),
        lambda net, h: h if h.max() > 0 else -h,
        lambda net, h: F.glu(torch.cat([h, h], -1)),
        lambda net, h: h + len(h),
        lambda net, h: h[:, :6],
        lambda net, h: h @ torch.eye(6),
        lambda net, h: h.relu() + 0 * net.up.weight[:, 0],
    ],
)
def test_what_may_need_all_features_is_no_pair(between):
    assert pairs_of(Net(between)) == []


def test_what_somebody_keeps_is_no_pair():
    def keep(net, h):
        net.kept = h.relu()
        return net.kept

    assert pairs_of(Net(keep)) == []


def test_what_the_step_returns_is_no_pair():
    net = Net()

    def step():
        h = net.up(torch.randn(3, 4))
        return net.down(h.relu()), h

    assert pairs_of(net, step) == []


def test_what_two_layers_read_is_no_pair():
    net = Net()
    other = nn.Linear(6, 4)
    both = nn.ModuleList([net, other])

    def step():
        h = net.up(torch.randn(3, 4)).relu()
        return net.down(h) + other(h)

    assert pairs_of(both, step) == []


def test_a_layer_has_to_be_the_same_in_all_calls():
    net = Net()

    def step():
        x = torch.randn(3, 4)
        return net.down(net.up(x).relu()) + net.down(torch.randn(3, 6))

    assert pairs_of(net, step) == []
    assert pairs_of(net, lambda: net(torch.randn(3, 4)) + net(torch.randn(3, 4))) == [Pair(("up",), "down")]


def test_tied_layers_are_no_pair():
    net = Net()
    net.gate.weight = net.up.weight
    assert pairs_of(net) == []


def test_a_chain_of_layers_is_divided_into_pairs_from_its_beginning():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    assert pairs_of(net) == [Pair(("0",), "2")]


def test_layers_with_a_forward_of_their_own_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    net = Net()
    net.up = Scaled(4, 6)
    assert pairs_of(net) == []


def test_looking_for_pairs_leaves_no_gradients_behind():
    net = Net()
    pairs_of(net)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_the_layers_of_a_pair_are_one_block():
    (block,) = pair_blocks(dict(Net().named_modules()), [Pair(("gate", "up"), "down")])
    assert {name: how.style for name, how in block.layers.items()} == {"gate": "column", "up": "column", "down": "row"}
    assert block.source == "found in the step"


def test_who_reads_a_weight_is_seen():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head, self.other = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.Linear(4, 4)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            assert self.other.weight.dtype == torch.float32
            x = self.head(self.table(tokens))
            return x + F.linear(self.other(self.table(tokens)), self.table.weight)

    net = nn.ModuleDict({"net": Tied()})
    modules = dict(net.named_modules(remove_duplicate=False))
    readers = watch(modules, lambda: net["net"](torch.arange(3))).readers
    assert readers[id(net["net"].table.weight)] == {"net.table", "net.head", "net"}
    assert readers[id(net["net"].other.weight)] == {"net.other"}
    assert not net["net"].head._forward_hooks


def test_a_step_that_fails_leaves_no_hooks():
    net = Net(lambda net, h: h.unknown())
    with pytest.raises(AttributeError):
        pairs_of(net)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_questions_about_a_weight_are_no_reads():
    net = Net()

    def step():
        for parameter in net.parameters():
            assert parameter.requires_grad_().shape
            assert parameter._version >= 0
        return net(torch.randn(3, 4))

    readers = watch(dict(net.named_modules()), step).readers
    assert readers[id(net.up.weight)] == {"up"}
    assert id(net.gate.weight) not in readers


def test_a_pair_that_gets_narrower_in_between_is_not_worth_it():
    adapter = nn.Sequential(nn.Linear(6, 2), nn.ReLU(), nn.Linear(2, 6))
    pairs = pairs_of(adapter, lambda: adapter(torch.randn(3, 6)))
    assert pairs == [Pair(("0",), "2")]
    assert pair_blocks(dict(adapter.named_modules()), pairs) == []


def test_transformers_of_pytorch_take_no_short_cut_while_they_are_watched():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    net = nn.Sequential(layer)
    readers = watch(dict(net.named_modules()), lambda: net(torch.randn(2, 3, 4))).readers
    assert readers[id(layer.linear1.weight)] == {"0.linear1"}
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_copy_in_half_precision_is_the_weight():
    class Half(Net):
        def forward(self, x):
            return self.down(self.up(x).relu()) + F.linear(x, self.gate.weight)[:, :4]

    net = Half()

    def step():
        halves = {name: parameter.to(torch.bfloat16) for name, parameter in net.named_parameters()}
        return torch.func.functional_call(net, halves, torch.randn(3, 4).bfloat16())

    watched = watch(dict(net.named_modules()), step)
    assert watched.pairs == (Pair(("up",), "down"),)
    assert watched.readers[id(net.up.weight)] == {"up"}
    assert watched.readers[id(net.gate.weight)] == {""}
    assert id(net.gate.bias) not in watched.readers
