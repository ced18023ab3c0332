"""Small steps that use the results of units in many ways. Two stages cut each of them in the middle."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor, scale: Tensor | float = 1.0, *, shift: Any = None) -> Tensor:
        x = x + self.mlp(self.norm(x)) * scale
        return x if shift is None else x + shift


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: Any = None


class Named(NamedTuple):
    hidden: Tensor
    size: int


class Net(nn.Module):
    """Four blocks; ``forward`` is given by the test."""

    def __init__(self, step: Callable[["Net", Tensor], Tensor], block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.offset = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.step = step

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.step(self, batch["x"])


def add_in_place(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x) * 1
    early = h * 1
    h += b(h * 1)
    late = c(h)
    early += late  # runs on the stage of `late`
    late = d(early) * 1
    late.mul_(0.5)
    return (late + early).pow(2).mean()


def set_items(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x)) * 1
    h[:, 0] = 1.0
    g = d(c(h)) * 1
    g[:, 1] = h[:, 2]
    g[:, 2] += h[:, 0]
    g.clamp_(min=-1.0)
    return g.pow(2).mean()


def change_through_a_view(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x)) * 1
    flat = h.view(-1)
    flat.mul_(2)
    g = d(c(h)) * 1
    column = g[:, 0]
    g.mul_(3)
    return g.pow(2).mean() + column.sum()


def change_after_sending(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x) * 1
    view = h.view(-1, WIDTH)
    late = d(c(b(h * 1)))
    mixed = late + view  # sends the view on
    h.add_(1.0)
    return (mixed + view).pow(2).mean()  # one process sees the change in the view


def change_a_detached_tensor(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x)) * 1
    late = c(h * 1)
    with torch.no_grad():
        h.detach().mul_(2)
    return d(late + h).pow(2).mean()


def containers(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    hidden = [a(x)]
    hidden.append(b(hidden[-1]))
    hidden.append(c(hidden[-1]))
    hidden.append(d(hidden[-1]))
    both = torch.stack(hidden)
    first, *_, last = both
    left, right = torch.cat([first, last], dim=-1).chunk(2, dim=-1)
    return (left * right).mean() + sum(h.mean() for h in hidden)


def keyword_arguments(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x, scale=2.0)
    g = b(x=h, shift=net.offset)
    g = c(g, scale=h, shift=h.detach())
    return d(g, h.mean()).pow(2).mean()


def glue_parameter(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    token = net.offset.expand(len(x), WIDTH)
    h = b(a(x + token))
    return (d(c(h * token)) - net.offset).pow(2).mean()


def branches(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    if h.mean() > 0:
        h = h * 2
    scale = float(h.detach().abs().max().clamp(min=1.0))
    for _ in range(1 + int(h.argmax()) % 2):
        h = c(h) / scale
    return d(h).pow(2).mean() + h.detach()[h > 0].sum().item()


def no_grad_target(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    with torch.no_grad():
        target = d(c(x)) * 0.5
    return F.mse_loss(d(c(b(a(x)))), target)


def reversed_flow(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    return a(d(b(c(a(d(x)))))).pow(2).mean()


STEPS = {
    step.__name__: step
    for step in (
        *(add_in_place, set_items, change_through_a_view, change_a_detached_tensor, containers, keyword_arguments),
        *(glue_parameter, branches, no_grad_target, reversed_flow),
    )
}


class ReturnsDict(Block):
    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return {"hidden": h, "pair": (h.mean(), None), "size": 3}


class ReturnsNested(Block):
    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return [Named(h, 1), {"none": None, "name": "text", "list": [h * 2]}]


class ReturnsDataclass(Block):
    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return Output(h, extra=Output(h.sum(), extra=2))


class TakesDataclass(Block):
    def forward(self, x: Any) -> Any:
        if isinstance(x, Output):
            x = x.hidden + x.extra
        return Output(super().forward(x), extra=x.mean())


class ChangesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1 if x.grad_fn is None else x
        return x.mul_(0.5) + super().forward(x)


def through_dicts(net: Net, x: Tensor) -> Tensor:
    total: Any = 0.0
    for block in net.blocks:
        out = block(x)
        x = out["hidden"]
        total = total + out["pair"][0] * out["size"]
        assert out["pair"][1] is None
    return x.pow(2).mean() + total


def through_nests(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        named, rest = block(x)
        assert rest["none"] is None
        assert rest["name"] == "text"
        x = named.hidden * named.size + rest["list"][0]
    return x.pow(2).mean()


def through_dataclasses(net: Net, x: Tensor) -> Tensor:
    total: Any = 0.0
    for block in net.blocks:
        out = block(x)
        x = out.hidden
        total = total + out.extra.hidden * out.extra.extra
    return x.pow(2).mean() + total


def into_dataclasses(net: Net, x: Any) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x.hidden.pow(2).mean() + x.extra


def one_after_the_other(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x.pow(2).mean()


UNITS: dict[str, tuple[Callable[[Net, Any], Tensor], type[nn.Module]]] = {
    "dict": (through_dicts, ReturnsDict),
    "nest": (through_nests, ReturnsNested),
    "dataclass": (through_dataclasses, ReturnsDataclass),
    "dataclass as argument": (into_dataclasses, TakesDataclass),
    "changed input": (one_after_the_other, ChangesItsInput),
}


def draws(net: Net, x: Tensor) -> Tensor:
    """Random numbers of all kinds in the glue and in a unit."""
    a, b, c, d = net.blocks
    x = x[torch.randperm(len(x))] * float(np.random.beta(1.0, 1.0))
    h = F.dropout(a(x), 0.5)
    h = b(h) + torch.randn(WIDTH) * random.random()
    h = c(h) + torch.randn_like(h)
    return d(h).pow(2).mean() * random.random() + np.random.rand()


class Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random() + np.random.rand()) + torch.rand(())


def batch(step: int = 0, samples: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(step))}
