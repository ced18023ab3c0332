"""Units take and return what they like, and are used in any way that Python allows."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compare import GLUE, REUSED, SAMPLES, USES, WIDTH, Block, Blocks, Case, check, in_order, mean_square

# What units take and return


class State(NamedTuple):
    hidden: Tensor
    cell: Tensor | None


@dataclasses.dataclass
class Report:
    hidden: Tensor
    mask: Tensor | None = None
    name: str = ""
    parts: list[Tensor] = dataclasses.field(default_factory=list)


class ManyKinds(Block):
    def forward(self, state: Any, /, *rest: Any, table: dict[str, Any], scale: float = 1.0, **more: Any) -> Any:
        hidden = state.hidden if isinstance(state, State) else state["report"].hidden
        hidden = super().forward(hidden) * scale + table["rotary"][0] * more["sign"]
        if isinstance(state, State):
            assert state.cell is None or state.cell.shape == (len(hidden), 1)
            return OrderedDict(report=Report(hidden, None, "name", [hidden.sum(1), hidden.detach()]), nothing=None)
        return State(hidden, state["report"].parts[0][:, None])


def many_kinds(net: Any, x: Tensor) -> Tensor:
    """Positional, keyword-only and shared keyword arguments; named tuples, dicts, dataclasses and None in turn."""
    table = {"rotary": (torch.linspace(0, 1, WIDTH).expand_as(x), None), "size": len(x)}
    state: Any = State(x, None)
    total = torch.zeros(())
    for number, block in enumerate(net.blocks):
        state = block(state, number, table=table, scale=0.5, sign=-1)
        if not isinstance(state, State):
            assert state["nothing"] is None
            assert state["report"].name == "name"
            total = total + state["report"].parts[1].mean()
    return mean_square(state.hidden) + total


class WithMask(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, cos: Tensor, sin: Tensor) -> Tensor:
        x = super().forward(x) * cos + x.roll(1, -1) * sin
        return x if mask is None else x * mask


def shared_keywords(net: Any, x: Tensor) -> Tensor:
    """Tensors that depend on a first unit and go to all the others."""
    a, *rest = net.blocks
    angle = a(x, cos=torch.ones(WIDTH), sin=torch.zeros(WIDTH))
    cos, sin = angle.cos(), angle.sin()
    mask = angle.detach() > 0
    for block in rest:
        x = block(x, mask=mask, cos=cos, sin=sin)
    return mean_square(x)


class Lists(Block):
    def forward(self, features: list[Tensor]) -> list[Tensor]:
        return [*features, super().forward(features[-1] + features[0])]


def growing_lists(net: Any, x: Tensor) -> Tensor:
    features = [x]
    for block in net.blocks:
        features = block(features)
    return sum(mean_square(feature) for feature in features)


class HasNone(Block):
    def forward(self, x: Tensor | None, extra: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        if x is None:
            return super().forward(extra), None
        return None, super().forward(x)


def nones(net: Any, x: Tensor) -> Tensor:
    pair: tuple[Any, Any] = (x, None)
    for block in net.blocks:
        pair = block(*pair)
    assert pair[1] is None
    return mean_square(pair[0])


class Integers(Block):
    def forward(self, x: Tensor, code: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if code is not None:
            x = x + F.one_hot(code, WIDTH)
        x = super().forward(x)
        return x, x.argmax(-1), x > 0


def integer_results(net: Any, x: Tensor) -> Tensor:
    code = None
    for block in net.blocks:
        x, code, positive = block(x, code)
        assert (code.dtype, positive.dtype, code.requires_grad) == (torch.int64, torch.bool, False)
        x = x.masked_fill(~positive, -0.5)
    return mean_square(x)


class Frequencies(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.is_complex():
            return super().forward(torch.fft.irfft(x, n=WIDTH))
        return torch.fft.rfft(super().forward(x))


def complex_results(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
        if x.is_complex():
            x = x * torch.tensor(0.5 + 0.1j)
    return mean_square(x)


class Cache:
    """Holds what blocks have made, like a key/value cache."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        return torch.stack(self.keys).mean(0)


class Caching(Block):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = super().forward(x)
        return x if cache is None else x + cache.update(x)


def local_cache(net: Any, x: Tensor) -> Tensor:
    """Every block has a cache of its own."""
    for block in net.blocks:
        x = block(x, Cache())
    return mean_square(x)


class Slots(Cache):
    """One for all blocks, with a place for each."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[int, Cache] = {}

    def update(self, key: Tensor) -> Tensor:
        return self.slots.setdefault(len(self.slots), Cache()).update(key)


def cache_with_slots(net: Any, x: Tensor) -> Tensor:
    cache = Slots()
    for block in net.blocks:
        x = block(x, cache)
    return mean_square(x)


class Appending(Block):
    """Adds what it has found to what it is given."""

    def forward(self, x: Tensor, found: Any) -> Tensor:
        x = super().forward(x)
        if isinstance(found, Report):
            found.parts.append(x.square().mean())
            found.hidden = found.hidden + x
        elif isinstance(found, dict):
            found["total"] = found.get("total", 0.0) + x.abs().mean()
            found.setdefault("all", []).append(x)
        else:
            found.append(x.square().mean())
        return x


def to_a_list(net: Any, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    for block in net.blocks:
        x = block(x, found)
    assert len(found) == 4
    return mean_square(x) + torch.stack(found).mean()


def to_a_dict(net: Any, x: Tensor) -> Tensor:
    found: dict[str, Any] = {"all": []}
    known = found["all"]
    for block in net.blocks:
        x = block(x, found)
    assert found["all"] is not None
    assert len(known) == 4
    return mean_square(x) + found["total"] + mean_square(found["all"][2])


def to_a_dataclass(net: Any, x: Tensor) -> Tensor:
    found = Report(x)
    for block in net.blocks:
        x = block(x, found)
    return mean_square(found.hidden) + sum(found.parts)


# How units are used


class Methods(Block):
    def attend(self, x: Tensor, *, scale: float) -> Tensor:
        return self.mlp(self.norm(x)) * scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, scale=0.5)


def other_methods(net: Any, x: Tensor) -> Tensor:
    """Methods of a unit beside ``forward``, called from the glue."""
    for block in net.blocks:
        x = block(x) + block.attend(x, scale=2.0)
    return mean_square(x)


def parts_of_units(net: Any, x: Tensor) -> Tensor:
    """The step calls modules inside of units, and the units never."""
    for block in net.blocks:
        x = x + block.mlp(block.norm(x))
    return mean_square(x)


def units_and_parts(net: Any, x: Tensor) -> Tensor:
    """It calls both."""
    for block in net.blocks:
        x = block(x) + block.mlp(x)
    return mean_square(x)


def weights_by_name(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    h = F.linear(h, a.mlp[0].weight, d.mlp[0].bias)
    h = F.layer_norm(d(c(h)), (WIDTH,), c.norm.weight)
    return mean_square(h) + 0.01 * torch.cat([p.flatten() for p in b.parameters()]).abs().sum()


def backwards_and_again(net: Any, x: Tensor) -> Tensor:
    """Blocks in reverse order, and each of them twice."""
    for block in [*reversed(net.blocks), *net.blocks]:
        x = block(x)
    return mean_square(x)


def functional_call(net: Any, x: Tensor) -> Tensor:
    """A unit with other weights."""
    a, b, c, d = net.blocks
    halves = {name: parameter * 0.5 for name, parameter in b.named_parameters()}
    h = torch.func.functional_call(b, halves, (a(x),))
    return mean_square(d(c(h)))


class Attention(nn.MultiheadAttention):
    """Computes otherwise where query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2)


def to_itself(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x, x, x, need_weights=False)[0]
    return mean_square(x)


class Energy(Block):
    """Adds the slope of a function."""

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: super(Energy, self).forward(x).pow(2).sum())(x)
        return super().forward(x) + slope


class Tables(Block):
    """Keeps what it has seen in containers within containers, and in tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)
        self.tables: dict[str, Any] = {"means": [torch.ones(WIDTH)], "calls": {"all": 0}}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        self.tables["calls"]["all"] += 1
        for mean in (self.mean, self.tables["means"][0]):
            mean.mul_(0.9).add_(y.detach().mean(0))
            y = torch.sin(y * mean.clone() * self.tables["calls"]["all"])
        return y


STEPS = {
    "torch.func": Case(lambda: Blocks(in_order, Energy)),
    "attention to itself": Case(lambda: Blocks(to_itself, Attention)),
    "nested containers": Case(lambda: Blocks(in_order, Tables)),
    "many kinds": Case(lambda: Blocks(many_kinds, ManyKinds)),
    "shared keywords": Case(lambda: Blocks(shared_keywords, WithMask), USES),
    "growing lists": Case(lambda: Blocks(growing_lists, Lists), USES),
    "None": Case(lambda: Blocks(nones, HasNone)),
    "integers": Case(lambda: Blocks(integer_results, Integers)),
    "complex numbers": Case(lambda: Blocks(complex_results, Frequencies)),
    "a cache for each": Case(lambda: Blocks(local_cache, Caching)),
    "one cache with slots": Case(lambda: Blocks(cache_with_slots, Caching)),
    "appended to a list": Case(lambda: Blocks(to_a_list, Appending), USES),
    "put into a dict": Case(lambda: Blocks(to_a_dict, Appending), USES),
    "put into a dataclass": Case(lambda: Blocks(to_a_dataclass, Appending), USES),
    "other methods": Case(lambda: Blocks(other_methods, Methods), GLUE),
    "parts of units": Case(lambda: Blocks(parts_of_units)),
    "units and parts": Case(lambda: Blocks(units_and_parts), GLUE),
    "weights by name": Case(lambda: Blocks(weights_by_name), GLUE),
    "backwards and again": Case(lambda: Blocks(backwards_and_again), REUSED),
    "functional_call": Case(lambda: Blocks(functional_call), GLUE),
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_a_unit_used_in_any_way_has_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(STEPS[name], pp)


# Containers


class Routed(nn.Module):
    """Modules that are chosen by a string in the batch; the others get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleDict({name: Block() for name in ("left", "right", "unused")})
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.shifts = nn.ParameterDict({"left": torch.randn(WIDTH), "right": torch.randn(WIDTH)})

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block, scale in zip(self.trunk, self.scales, strict=True):
            x = block(x) * scale
        names = batch["head"]
        outputs = [self.heads[name](row[None]) + self.shifts[name] for name, row in zip(names, x, strict=True)]
        return mean_square(torch.cat(outputs))

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        sides = torch.rand(SAMPLES, generator=generator) > 0.5
        return {
            "x": torch.randn(SAMPLES, WIDTH, generator=generator),
            "head": ["left" if side else "right" for side in sides.tolist()],
        }


class Lazy(nn.Module):
    """Lazy modules that a dry batch has completed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d()) for _ in range(4))
        self.loss({"x": torch.randn(4, WIDTH)})

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x).tanh()
        return mean_square(x)

    batch = staticmethod(Blocks.batch)


class Tabled(Block):
    """Keeps a table for the next call, as rotary embeddings do, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x)).float()[:, None] / 8
        return super().forward(x * self.table[: len(x)])


class OfAnySize(Blocks):
    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        samples = int(torch.randint(3, 10, (), generator=generator))
        return {"x": torch.randn(samples, WIDTH, generator=generator)}


class InParts(nn.Module):
    """Containers with a ``forward`` and hooks of their own, three levels deep, some units in plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"down": nn.ModuleList([Block(), Block()]), "up": nn.Sequential(Block(), Block())})
        self.register_buffer("table", torch.randn(WIDTH))
        self.register_buffer("hidden_table", torch.randn(WIDTH), persistent=False)
        self.plain = list(self.body["down"])
        self.body["up"].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.body["up"].register_forward_hook(lambda module, args, output: output + args[0])

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"] + self.table
        for block in self.plain:
            x = block(x)
        return mean_square(self.body["up"](x * self.hidden_table))

    batch = staticmethod(Blocks.batch)


CONTAINERS = {
    "chosen by the batch": Case(Routed, GLUE),
    "lazy modules": Case(Lazy),
    "nested containers": Case(InParts, USES),
    "tables that units keep": Case(lambda: OfAnySize(in_order, Tabled)),
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_of_units_have_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(CONTAINERS[name], pp)
