"""Calls whose results nobody can predict, tensors kept beyond their step, and other ways around ``__torch_function__``:
two stages have the numbers of one process."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp_strategy.errors import UnsupportedError
from smp_strategy.testing import run_ranks

from .step_runs import alone, assert_as_alone, engine_for, train
from .steps import Block, Net, batch, one_after_the_other


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


def slices_by_value(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    few = (h.detach()[:, 0] > 0).sum().clamp(1, len(x) - 1)
    g = d(c(h)) * 1
    g[:few] = 0.0
    return g[: few + 1].pow(2).sum() + (h[few:] * x[few:]).sum() + g[:, 1 : few // few + 2].sum()


def numbers_by_value(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    few = (h.detach()[:, 0] > 0).sum().clamp(1, len(x) - 1)
    g = d(c(h))
    weights = torch.linspace(0, few, 4) + torch.tensor([few, 2.0, 0.0, few + 1])
    return (g * weights).pow(2).sum() + (g[:few] * torch.arange(few)[:, None]).sum()


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


class Projected(torch.autograd.Function):
    """A product with a weight that no mode sees, as in a loss that is fused with the last layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight[:2].T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight[:2], torch.cat([grad.T @ x, torch.zeros_like(weight[2:])])


def weights_given_to_functions(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    early = Projected.apply(d(c(b(a(x)))), a.mlp[0].weight)
    return (early + Projected.apply(x, d.mlp[0].weight)).pow(2).mean()


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


_collector: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("collector", default=None)


class Watched(Block):
    """A hook inside collects what passes, where somebody wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.register_forward_hook(self.collect)

    @staticmethod
    def collect(module: nn.Module, args: Any, output: Tensor) -> None:
        if (collected := _collector.get()) is not None:
            collected["norms"].append(output)


def collect_inside_units(net: Net, x: Tensor) -> Tensor:
    collected: dict[str, list[Tensor]] = {"norms": []}
    token = _collector.set(collected)
    loss = one_after_the_other(net, x)
    _collector.reset(token)
    assert len(collected["norms"]) == len(net.blocks)
    return loss + torch.cat(collected["norms"]).pow(4).mean()


STEPS: dict[str, tuple[Any, type[nn.Module]]] = {
    "shapes by value": (one_after_the_other, KeepsSome),
    "experts": (one_after_the_other, Experts),
    "nests by value": (rows_by_value, TuplesByValue),
    "masks": (mask_in_the_glue, Block),
    "slices": (slices_by_value, Block),
    "numbers": (numbers_by_value, Block),
    "autograd functions": (functions_in_the_glue, Block),
    "weights given to autograd functions": (weights_given_to_functions, Block),
    "checkpoint": (checkpoints(False), Block),
    "reentrant checkpoint": (checkpoints(True), Block),
    "plain tensors": (fill_a_plain_tensor, Block),
    "buffers": (change_a_buffer, Block),
    "collectors": (collect_inside_units, Watched),
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


def gradients_seen(pp: int | None) -> list[Any]:
    """What hooks on gradients see, in the order in which they see it."""
    seen: list[Any] = []

    def step(net: Net, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        h = b(a(x)) * 1
        h.register_hook(lambda grad: seen.append(("h", grad.clone())))
        h.register_hook(lambda grad: grad * 2)
        late = c(h)
        late.register_hook(lambda grad: seen.append(("late", grad.clone())))
        return d(late + h).pow(2).mean() + late.sum()

    torch.manual_seed(0)
    net = Net(step)
    for name in ("blocks.1", "blocks.2", "blocks.2.mlp"):

        def see(module: nn.Module, given: Any, received: Any, name: str = name) -> Any:
            seen.append((name, type(module).__name__, given[0].clone(), received[0].clone()))
            return (given[0] * 0.5,) if name == "blocks.2" else None

        net.get_submodule(name).register_full_backward_hook(see)
    net.blocks[3].register_full_backward_pre_hook(lambda module, received: (received[0] * 3,))
    if pp is None:
        net.loss(batch()).backward()
    else:
        engine = engine_for(net, pp, microbatches=1)
        engine.train_step(net.loss, batch(), loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
    return [seen, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}]


@pytest.mark.parametrize("pp", [2, 4])
def test_hooks_on_gradients_run_where_the_gradients_are(pp):
    expected, gradients = gradients_seen(None)
    seen: dict[str, Any] = {}
    for found, found_gradients in run_ranks(gradients_seen, pp, pp):
        assert not seen.keys() & {name for name, *_ in found}
        seen.update((name, rest) for name, *rest in found)
        for name, gradient in found_gradients.items():
            assert torch.equal(gradient, gradients[name]), name
    assert seen.keys() == {name for name, *_ in expected}
    for name, *rest in expected:
        assert all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(rest, seen[name], strict=True)
        )


def hook_on_a_container() -> str:
    net = Net(one_after_the_other)
    outer = nn.ModuleDict({"net": net})
    net.forward = lambda x: one_after_the_other(net, x)
    net.register_full_backward_hook(lambda module, given, received: None)
    try:
        engine_for(outer, 2).train_step(lambda part: net(part["x"] * 1), batch(), loss_of=lambda loss: loss)
    except UnsupportedError as error:
        return str(error)
    return "not refused"


def test_a_backward_hook_on_a_container_is_refused():
    for message in run_ranks(hook_on_a_container, 2):
        assert "backward hook is registered on a module above the units" in message


class AroundUnits(torch.autograd.Function):
    """Runs the blocks that it is given, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: list[nn.Module]) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def function_around_units() -> str:
    def step(net: Net, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        return AroundUnits.apply(a(x), [b, c, d]).pow(2).mean()

    net = Net(step)
    try:
        engine_for(net, 2).train_step(net.loss, batch(), loss_of=lambda loss: loss)
    except UnsupportedError as error:
        return str(error)
    return "not refused"


def test_an_autograd_function_that_calls_units_is_refused():
    for message in run_ranks(function_around_units, 2):
        assert "`AroundUnits`, an autograd Function in the code above the units, calls unit `blocks.1`" in message


def differing_replicas(pp: int) -> dict[str, Tensor]:
    """Two replicas whose first batches lead along different paths; on one the glue uses the weight of a unit."""

    def step(net: Net, x: Tensor) -> Tensor:
        h = one_after_the_other(net, x)
        return h + net.blocks[0].norm.weight.sum() if x.sum() > 0 else h * 2

    torch.manual_seed(0)
    net = Net(step)
    batches = [torch.full((2, 4), -1.0) * torch.arange(1, 9).view(2, 4), torch.arange(8.0).view(2, 4)]
    if pp == 0:
        for x in batches:
            (net.loss({"x": x}) / 2).backward()
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    engine = engine_for(net, pp, microbatches=1)
    x = batches[engine.mesh.dp_rank]
    engine.train_step(net.loss, {"x": x}, loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def test_replicas_whose_first_batches_differ_agree_on_one_partition():
    expected = differing_replicas(0)
    merged: dict[str, Tensor] = {}
    for found in run_ranks(differing_replicas, 4, 2):
        merged.update(found)
    assert merged.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(merged[name], gradient, rtol=1e-6, atol=1e-6)
