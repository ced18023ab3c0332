"""Calls whose results nobody can predict, tensors kept beyond their step, and other ways around ``__torch_function__``:
two stages have the numbers of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp_strategy.testing import run_ranks

from .steps import Block, Net, batch, one_after_the_other
from .test_placed import alone, assert_as_alone, engine_for, train


class KeepsSome(Block):
    """Returns the rows above the mean: the shape depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x[x.detach().sum(dim=1) >= x.detach().sum(dim=1).mean()]


class Experts(Block):
    """Rows find their expert by value; the shape of the result does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows) > 0:
                out = out.index_add(0, rows, expert(x[rows]))
        return super().forward(x) + out


class TuplesByValue(Block):
    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return {"rows": [h[h[:, 0] > 0], None, int((h[:, 0] > 0).sum())], "all": h}


def rows_by_value(net: Net, x: Tensor) -> Tensor:
    total: Any = 0.0
    for block in net.blocks:
        out = block(x)
        x = out["all"]
        total = total + out["rows"][0].sum() * out["rows"][2]
    return x.pow(2).mean() + total


def mask_in_the_glue(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    some = h[h > 0]
    g = d(c(h))
    return g[h > 0].pow(2).sum() + (some * 2).sum()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.factor * grad, None


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Any:
        return x * y, x.detach().round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, y = ctx.saved_tensors
        return grad * y * 2, grad * x


def functions_in_the_glue(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = Reverse.apply(a(x), 0.5)
    product, rounded = TwoResults.apply(b(h), h)
    return Reverse.apply(d(c(product)) + rounded, 2.0).pow(2).mean()


def checkpoints(reentrant: bool) -> Callable[[Net, Tensor], Tensor]:
    def step(net: Net, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        h = a(x)
        h = checkpoint(b, h, use_reentrant=reentrant)
        h = checkpoint(lambda h: d(c(h) * 2), h, use_reentrant=reentrant)
        return h.pow(2).mean()

    return step


def fill_a_plain_tensor(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    out = torch.zeros(len(x), 3, 4)
    out[:, 0] = h = a(x)
    out[:, 1] = h = b(h)
    out[:, 2] = d(c(h))
    parameter = net.offset * 2
    parameter += out[0, 0]
    return out.pow(2).mean() + parameter.sum()


def change_a_buffer(net: Net, x: Tensor) -> Tensor:
    loss = one_after_the_other(net, x)
    with torch.no_grad():
        net.count += loss.detach()
        net.count.mul_(0.5)
    return loss * (1 + net.count)


STEPS: dict[str, tuple[Any, type[nn.Module]]] = {
    "shapes by value": (one_after_the_other, KeepsSome),
    "experts": (one_after_the_other, Experts),
    "nests by value": (rows_by_value, TuplesByValue),
    "masks": (mask_in_the_glue, Block),
    "autograd functions": (functions_in_the_glue, Block),
    "checkpoint": (checkpoints(False), Block),
    "reentrant checkpoint": (checkpoints(True), Block),
    "plain tensors": (fill_a_plain_tensor, Block),
    "buffers": (change_a_buffer, Block),
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_the_numbers_of_one_process(name, pp):
    results = run_ranks(train_twice, pp, name, pp)
    assert_as_alone(alone_twice(name), results)


def train_twice(name: str, pp: int) -> Any:
    return train(*STEPS[name], pp, {"microbatches": 1 if name == "buffers" else 2})


def alone_twice(name: str) -> Any:
    step, block = STEPS[name]
    if name != "buffers":
        return alone(step, block)
    torch.manual_seed(0)
    net = Net(step, block)
    for number in range(2):
        net.zero_grad()
        loss = net.loss(batch(number))
        loss.backward()
    return loss.item(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


class Running(Net):
    """Uses what it kept from earlier steps."""

    hidden: Any = None

    def loss(self, given: dict[str, Tensor]) -> Tensor:
        h = self.blocks[1](self.blocks[0](given["x"]))
        before = torch.zeros_like(h) if self.hidden is None else self.hidden
        self.hidden = h.detach()
        self.losses.append((self.blocks[3](self.blocks[2](h + before)) - before).pow(2).mean())
        return self.losses[-1]


def run_on(make_engine: Callable[[nn.Module], Any] | None) -> list[float]:
    torch.manual_seed(0)
    net = Running(one_after_the_other)
    net.losses = []
    engine = make_engine(net) if make_engine else None
    for number in range(3):
        if engine is None:
            net.loss(batch(number)).backward()
        else:
            engine.train_step(net.loss, batch(number), loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
    stacked = torch.stack(net.losses)
    norm = sum(p.grad.norm() ** 2 for p in net.blocks[3].parameters() if p.grad is not None)
    return [
        *stacked.tolist(),
        stacked.mean().item(),
        float(net.losses[0].detach()),
        float(net.hidden.sum()),
        float(norm),
    ]


def run_on_ranks(pp: int) -> list[float]:
    return run_on(lambda net: engine_for(net, pp, microbatches=1))


@pytest.mark.parametrize("pp", [2, 4])
def test_tensors_that_are_kept_can_be_used_in_the_next_step_and_after_the_last(pp):
    expected = run_on(None)
    results = run_ranks(run_on_ranks, pp, pp)
    assert all(found[:-1] == expected[:-1] for found in results)
    assert sum(found[-1] for found in results) == pytest.approx(expected[-1])
