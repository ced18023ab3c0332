"""Calls that are run once more in backward: the numbers of ordinary ones, whatever is in them."""

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp_strategy.activations.checkpoint_state import SMALL_BYTES
from smp_strategy.activations.policy import KEEP
from smp_strategy.errors import UnsupportedError
from tests.unit.activations.calls import ALL, CHEAP, WIDTH, Mlp, gradients, numbers, treated

POLICIES = pytest.mark.parametrize("policy", [ALL, CHEAP], ids=["all", "cheap"])


def batch() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


class Draws(nn.Module):
    """From every stream."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.5) * random.random() * float(np.random.rand())
        return F.dropout(torch.tanh(x), 0.5) + torch.randn_like(x)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.tanh(self.norm(x))))


class Counts(nn.Module):
    """What it computes depends on how often it was called, on a list that it fills and on a buffer without a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.seen: list[int] = []
        self.late: Tensor | None = None
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.scale.data.mul_(0.5)
        factor = self.calls + len(self.seen) + (0 if self.late is None else self.late.mean())
        y = torch.tanh(self.linear(x) * factor * self.scale.clone())
        self.late = y.detach()
        return y


class Drops(nn.Module):
    """Attention with dropout, which draws inside of a product or around one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x[None], x[None], x[None], need_weights=False)
        return torch.tanh(y[0])


class InPlace(nn.Module):
    """Changes results of products in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu_()).mul_(2)


class Nested(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.linear(x))
        return torch.sin(checkpoint(self.mlp, x, use_reentrant=self.use_reentrant))


class Slope(nn.Module):
    """Runs a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1 if x.requires_grad else x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.mlp(x).pow(2).sum(), x, create_graph=True)
        return self.mlp(slope)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.lstm = nn.LSTM(2, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(torch.tanh(self.conv(x[:, None])).transpose(1, 2))
        return y.squeeze(-1)


class Recurrent(nn.Module):
    """Its kernel writes into results of products through views whose versions nobody counts."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.gru(x[None])[0][0])


class KeepsState(nn.Module):
    """In tensors that are no buffers, and in containers within containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mean = torch.zeros(WIDTH)
        self.tables = {"means": [torch.ones(WIDTH)], "calls": {"all": 0}}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.tables["calls"]["all"] += 1  # type: ignore[index,call-overload]
        for mean in (self.mean, self.tables["means"][0]):  # type: ignore[index]
            mean.mul_(0.9).add_(y.detach().mean(0))
            y = torch.sin(y * mean.clone() * self.tables["calls"]["all"])  # type: ignore[index,call-overload]
        return y


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "draws": Draws,
    "statistics": Statistics,
    "counts": Counts,
    "drops": Drops,
    "in_place": InPlace,
    "nested": lambda: Nested(False),
    "nested_reentrant": lambda: Nested(True),
    "slope": Slope,
    "recurrent": Recurrent,
    "convolutions": Convolutions,
    "sequential": lambda: nn.Sequential(Mlp(), nn.Dropout(0.5), Mlp()),
    "keeps_state": KeepsState,
    "parameterless": lambda: nn.Sequential(nn.Tanh(), Mlp()),
}


def once(call: Callable[..., Any]) -> Tensor:
    return call(batch()).pow(2).sum()


def between(call: Callable[..., Any]) -> Tensor:
    """With a gradient that goes on, and more random numbers."""
    x = batch().requires_grad_()
    y = call(x * 2) * 3
    loss = y.sum() + (y * torch.rand(())).pow(2).sum()
    return loss + x.sum()


def twice(call: Callable[..., Any]) -> Tensor:
    """One call on what another has returned."""
    return call(call(batch()) * 0.5).pow(2).sum()


def again(call: Callable[..., Any]) -> Tensor:
    """Backward twice through one graph."""
    loss = call(batch().requires_grad_()).pow(2).sum()
    loss.backward(retain_graph=True)
    return loss * 0.5


def under_autocast(call: Callable[..., Any]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = call(batch())
    return y.float().pow(2).sum()


@POLICIES
@pytest.mark.parametrize("step", [once, between, twice, again, under_autocast], ids=lambda step: step.__name__)
@pytest.mark.parametrize("name", MODULES)
def test_the_numbers_are_those_of_an_ordinary_call(name: str, step: Any, policy: Any) -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module = MODULES[name]()
    other = copy.deepcopy(module)

    def run(module: nn.Module, call: Callable[..., Any]) -> Any:
        random.seed(1)
        np.random.seed(1)
        result = numbers(module, call, step)
        return [*result, random.random(), np.random.rand(), torch.rand(()).item()]

    expected = run(other, treated(other, KEEP))
    assert run(module, treated(module, policy)) == expected
    if name == "counts":
        assert (module.calls, module.seen) == (other.calls, other.seen)
        assert torch.equal(module.late, other.late)


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


class Takes(nn.Module):
    """Nests, keywords, things that are no tensors; several results, one of them an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Any, factors: Any, *, which: str, mask: Any = None, extra: Any = ()) -> Any:
        x = torch.tanh(self.linear(pair.first)) * factors[which]
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        extra.append(x * 2)
        return Pair(x, pair.second), {"sum": x.sum(), "text": which, "extra": extra}


@POLICIES
def test_arguments_and_results_may_be_any_nests(policy: Any) -> None:
    found = []
    for chosen in (KEEP, policy):
        torch.manual_seed(0)
        module, weight = Takes(), torch.full((), 2.0, requires_grad=True)
        lists: list[Any] = []
        pair = Pair(batch(), batch().requires_grad_())
        result, more = treated(module, chosen)(
            pair, {"a": weight * 1, "b": 3.0}, which="a", mask=batch() > 1, extra=lists
        )
        assert more["extra"] is lists
        (result.first.pow(2).sum() + result.second.sum() + more["sum"] + lists[0].sum()).backward()
        assert len(lists) == 1
        found.append([gradients(module), weight.grad, pair.second.grad.tolist(), result.first.tolist()])
    assert found[0] == found[1]


@POLICIES
def test_what_is_one_argument_twice_is_one_again(policy: Any) -> None:
    found = []
    for chosen in (KEEP, policy):
        torch.manual_seed(0)
        module, x = nn.MultiheadAttention(WIDTH, 2), batch().requires_grad_()
        y = x * 1
        treated(module, chosen)(y, y, y, need_weights=False)[0].pow(2).sum().backward()
        found.append([gradients(module), x.grad.tolist()])
    assert found[0] == found[1]


def test_a_large_buffer_that_is_changed_before_backward_is_an_error() -> None:
    module = Mlp()
    module.register_buffer("table", torch.zeros(SMALL_BYTES))
    y = treated(module)(batch())
    module.table.add_(1)  # type: ignore[union-attr,operator]
    with pytest.raises(RuntimeError, match="a buffer or attribute of shape .65536. of `blocks.0`"):
        y.sum().backward()


def test_what_validation_has_left_in_attributes_does_no_harm() -> None:
    module = Mlp()
    with torch.inference_mode():
        module.seen, module.outputs = torch.ones(2), [torch.ones(2)]  # type: ignore[assignment]
        module.register_buffer("table", torch.ones(2))
    treated(module)(batch()).sum().backward()
    assert module.up.weight.grad is not None


@POLICIES
def test_transforms_inside_of_a_unit_are_refused_with_the_remedy(policy: Any) -> None:
    class Energy(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: x.pow(2).sum())(super().forward(x))

    with pytest.raises(UnsupportedError, match="`blocks.0` is a unit that is computed again .* Leave it out of"):
        treated(Energy(), policy)(batch())


def test_an_exception_in_the_middle_leaves_everything_as_it_is() -> None:
    module = Counts()

    def fail(*args: Any) -> None:
        raise ValueError("no")

    y = treated(module)(batch())
    handle = module.linear.register_forward_hook(fail)
    with pytest.raises(ValueError, match="no"):
        y.sum().backward()
    handle.remove()
    assert (module.calls, module.seen) == (1, [1])
    module.linear.register_forward_hook(fail)
    with pytest.raises(ValueError, match="no"):
        treated(module)(batch())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
