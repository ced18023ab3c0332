"""What has no right answer on several stages ends with an error that says what to do, and never with a wrong number."""

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .compare import Block, Blocks, Case, in_order, mean_square, refusal


def with_middle(use: Callable[[Any, Tensor], Any]) -> Case:
    """``use(net, h)`` gets what the second of four blocks returned."""

    def step(net: Any, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        h = b(a(x))
        use(net, h)
        return mean_square(d(c(h)))

    return Case(lambda: Blocks(step))


class Alternating(Block):
    """Skips itself every other time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 2 else super().forward(x)


def alternating() -> nn.Module:
    net = Blocks(in_order)
    net.blocks[1] = Alternating()
    return net


def parallel() -> nn.Module:
    net = Blocks(in_order)
    net.blocks[1].mlp = nn.DataParallel(net.blocks[1].mlp)
    return net


class Keeping(Block):
    """Leaves a statistic in an attribute, for the next block."""

    before: "tuple[Keeping, ...]" = ()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for other in self.before:
            x = x * other.mean
        self.mean = x.detach().mean()
        return x


def chained(step: Callable[[Any, Tensor], Tensor]) -> Case:
    def make() -> nn.Module:
        net = Blocks(step, Keeping)
        for one, other in itertools.pairwise(net.blocks):
            other.before = (one,)
        return net

    return Case(make)


def looks_at_values(net: Any, x: Tensor) -> Tensor:
    net.seen.append(net.blocks[0](x).sum().item())
    return in_order(net, x)


def hooked(looks: bool = False) -> nn.Module:
    found: list[Tensor] = []

    def step(net: Any, x: Tensor) -> Tensor:
        found.clear()
        loss = in_order(net, x)
        if looks:
            net.seen.append(loss.item())
        return loss + sum(found)

    net = Blocks(step)
    net.blocks[1].mlp.register_forward_hook(lambda module, args, output: found.append(mean_square(output)))
    return net


class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Caching(Block):
    reads: bool = True

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.keys.append(super().forward(x))
        return torch.stack(cache.keys).mean(0) if self.reads else cache.keys[-1]


class Writing(Caching):
    reads = False


def one_cache(net: Any, x: Tensor) -> Tensor:
    cache = Cache()
    for block in net.blocks:
        x = block(x, cache)
    return mean_square(x) + sum(map(mean_square, cache.keys))


def gradient_penalty(net: Any, h: Tensor) -> None:
    torch.autograd.grad(net.blocks[3](net.blocks[1](h)).sum(), h, create_graph=True)


def functional_gradient(net: Any, h: Tensor) -> None:
    torch.func.grad(lambda t: net.blocks[3](t).sum())(h)


CASES: dict[str, tuple[Case, str]] = {
    "pickle": (with_middle(lambda net, h: pickle.dumps(h)), "`__reduce_ex__` of a placed tensor.*cannot be pickled"),
    "deepcopy with a history": (with_middle(lambda net, h: copy.deepcopy(h)), "use `detach` first"),
    "storage": (with_middle(lambda net, h: h.untyped_storage()), "memory on one stage only"),
    "turned in place": (with_middle(lambda net, h: h.detach().t_()), "changed the shape of a placed tensor"),
    "requires_grad_(False)": (with_middle(lambda net, h: h.requires_grad_(False)), "use `detach`"),
    "gradient penalty in the glue": (
        with_middle(gradient_penalty),
        "parts of the graph.*several pipeline stages.*a unit",
    ),
    "torch.func.grad": (with_middle(functional_gradient), "under a transform of torch.func"),
    "vmap": (with_middle(lambda net, h: torch.vmap(lambda row: row.abs())(h)), "cannot be routed.*torch.vmap"),
    "attribute that another unit reads": (chained(in_order), r"unit `blocks\.0` put into its attribute `mean`"),
    "attribute that another unit reads, after a look at a value": (
        chained(looks_at_values),
        r"unit `blocks\.0` put into its attribute `mean`",
    ),
    "feature from inside of a unit": (Case(hooked), "by a hook on one of its parts"),
    "the same, after a look at a value": (Case(lambda: hooked(looks=True)), "by a hook on one of its parts"),
    "cache that all units read": (
        Case(lambda: Blocks(one_cache, Caching)),
        r"`blocks\.1` uses a tensor that unit `blocks\.0` put into an object",
    ),
    "cache that the glue reads": (Case(lambda: Blocks(one_cache, Writing)), "in an object that it was given"),
    "returns its input or something new": (
        Case(alternating),
        r"`blocks\.1` returned a tensor where its dry run returned one of its arguments",
    ),
    "data parallel": (Case(parallel), r"`blocks\.1\.mlp` is a DataParallel"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_has_no_right_answer_is_refused_with_the_reason(name: str) -> None:
    case, message = CASES[name]
    found = refusal(case)
    assert re.search(message, found, re.DOTALL), found
