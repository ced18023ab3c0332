"""Backward in two parts does what one whole backward does: the same bits, and every hook once."""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.segments import Import, enter
from smp_strategy.pipeline.split_backward import Deferred, backward_of_imports
from tests.product import Product

WIDTH = 8


class Net(nn.Module):
    """One layer and what is done with it."""

    def __init__(self, layer: nn.Module, use: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.use is None else self.use(self.layer, x)


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear(bias=False), nn.Tanh())


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def adapted(layers: Any, x: Tensor) -> Tensor:
    """A frozen layer and a low-rank one beside it."""
    return layers[0](x) + layers[2](layers[1](x))


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def transposed(layer: nn.Linear, x: Tensor) -> Tensor:
    """Both factors of a product are this layer's."""
    return torch.addmm(layer.bias, x.flatten(0, -2), layer.weight, alpha=0.5, beta=3).view(x.shape)


def convolved(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(1, 2))


def experts(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.bmm(x, layer.weight.expand(len(x), WIDTH, WIDTH) * 2)


def in_place(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x).relu_().mul(2).add_(x)


def weight_first(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.mm(layer.weight, x.flatten(0, -2).t())


LAYERS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "linear": (lambda: Net(linear()), True),
    "linear, in a matrix": (lambda: Net(linear(), lambda layer, x: layer(x[0])), True),
    "mlp": (lambda: Net(mlp()), True),
    "used twice": (lambda: Net(linear(), lambda layer, x: layer(layer(x))), False),
    "used twice, beside one used once": (lambda: Net(nn.Sequential(shared := linear(), linear(), shared)), True),
    "norm": (lambda: Net(nn.LayerNorm(WIDTH)), False),
    "frozen": (lambda: Net(nn.Sequential(frozen(linear()), linear(), frozen(linear()))), True),
    "only a bias": (lambda: Net(linear(), lambda layer, x: F.linear(x, layer.weight.detach(), layer.bias)), False),
    "adapter": (lambda: Net(nn.ModuleList([frozen(linear()), linear(bias=False), linear(bias=False)]), adapted), True),
    "weight norm": (lambda: Net(parametrizations.weight_norm(linear())), True),
    "orthogonal": (lambda: Net(parametrizations.orthogonal(linear())), True),
    "weight plus its transpose": (
        lambda: Net(linear(), lambda layer, x: F.linear(x, layer.weight + layer.weight.t(), layer.bias)),
        True,
    ),
    "product with factors": (lambda: Net(linear(), transposed), True),
    "batched product": (lambda: Net(linear(), experts), True),
    "weight first": (lambda: Net(linear(), weight_first), False),
    "convolution": (lambda: Net(nn.Conv1d(WIDTH, 4, 3, padding=1, groups=2), convolved), True),
    "transposed convolution": (lambda: Net(nn.ConvTranspose1d(WIDTH, 4, 3, stride=2), convolved), True),
    "attention": (lambda: Net(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)), True),
    "recurrent": (lambda: Net(nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda layer, x: layer(x)[0]), False),
    "batch norm": (lambda: Net(nn.BatchNorm1d(3)), False),
    "autograd Function": (lambda: Net(linear(), lambda layer, x: Product.apply(x, layer.weight)), False),
    "checkpoint": (lambda: Net(mlp(), checkpointed), False),
    "reentrant checkpoint": (lambda: Net(mlp(), reentrant), False),
    "checkpoint beside a layer": (lambda: Net(nn.Sequential(Net(mlp(), checkpointed), linear())), True),
    "in place": (lambda: Net(linear(), in_place), True),
    "beside the input": (lambda: Net(linear(), lambda layer, x: x + layer(torch.ones(3, WIDTH))), False),
}


def run(module: nn.Module, backward: Callable[[Tensor, Tensor, Import], None], repeats: int = 2) -> list[Tensor | None]:
    """Gradients of the input and of all weights."""
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor | None] = []
    for _ in range(repeats):
        record = Import(0, None)
        y = module(enter(torch.randn(2, 3, WIDTH, generator=generator), record))
        backward(y, torch.randn(y.shape, generator=generator), record)
        found.append(record.grad)
    return [*found, *(parameter.grad for parameter in module.parameters())]


def whole(y: Tensor, gradient: Tensor, record: Import) -> None:
    torch.autograd.backward(y, gradient)


def in_two(y: Tensor, gradient: Tensor, record: Import) -> None:
    deferred = backward_of_imports([y], [gradient], {record})
    assert record.grad is not None
    deferred.run()


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name][0]()


@pytest.mark.parametrize("name", LAYERS)
def test_the_gradients_are_those_of_one_backward(name):
    expected, found = run(made(name), whole), run(made(name), in_two)
    assert len(expected) == len(found) > 2
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (torch.equal(one, other) and one.stride() == other.stride())


@pytest.mark.parametrize("name", LAYERS)
def test_products_are_left_for_later_and_the_rest_is_done(name):
    module, splits = made(name), LAYERS[name][1]
    left = []

    def first_part(y: Tensor, gradient: Tensor, record: Import) -> None:
        left.append(backward_of_imports([y], [gradient], {record}))

    run(module, first_part, repeats=1)
    assert bool(left[0]) == splits
    early = gradients_of(module.parameters())
    left[0].run()
    assert not left[0]
    assert (early != gradients_of(module.parameters())) == splits


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[bool]:
    return [parameter.grad is not None for parameter in parameters]


def test_biases_wait_with_their_weights_and_norms_do_not_wait():
    module = mlp()
    record = Import(0, None)
    y = module(enter(torch.randn(2, WIDTH), record))
    deferred = backward_of_imports([y], [torch.ones_like(y)], {record})
    assert gradients_of(module.parameters()) == [True, True, False, False, False]
    deferred.run()
    assert all(gradients_of(module.parameters()))


def test_a_segment_that_nobody_waits_for_is_left_as_a_whole():
    module = mlp()
    y = module(torch.randn(2, WIDTH))
    deferred = backward_of_imports([y], [torch.ones_like(y)], set())
    assert not any(gradients_of(module.parameters()))
    deferred.run()
    assert all(gradients_of(module.parameters()))


def test_imports_that_nobody_waits_for_get_their_gradients_in_the_end():
    record, glue = Import(0, None), Import(1, None)
    layer = linear()
    weight = enter(torch.randn(WIDTH, WIDTH), glue)
    y = layer(enter(torch.randn(2, WIDTH), record)) @ weight
    deferred = backward_of_imports([y], [torch.ones_like(y)], {record})
    assert record.grad is not None
    assert glue.grad is None
    deferred.run()
    assert glue.grad is not None


def test_several_roots_and_leaves_among_them():
    def step(backward: Callable[..., None]) -> list[Tensor | None]:
        torch.manual_seed(0)
        module, record = nn.Sequential(linear(), linear(), linear()), Import(0, None)
        h = module[0](enter(torch.randn(2, WIDTH), record))
        y = module[2](module[1](h))
        roots = [h, y, module[0].bias, module[1].weight * 2]
        backward(roots, [torch.randn(root.shape) for root in roots], record)
        return [record.grad, *(parameter.grad for parameter in module.parameters())]

    def split(roots: list[Tensor], gradients: list[Tensor], record: Import) -> None:
        deferred = backward_of_imports(roots, gradients, {record})
        assert deferred
        deferred.run()

    expected = step(lambda roots, gradients, record: torch.autograd.backward(roots, gradients))
    assert all(torch.equal(one, other) for one, other in zip(expected, step(split), strict=True))


def hooked(calls: list[str]) -> tuple[nn.Sequential, Callable[[Tensor], Tensor]]:
    """Three layers with hooks of every kind on them, each of which changes what it sees, if it can."""

    def noting(name: str, factor: float) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            calls.append(name)
            return gradient * factor

        return hook

    torch.manual_seed(0)
    module = nn.Sequential(linear(), linear(), linear(), linear())
    module[0].weight.register_hook(noting("weight", 0.5))
    module[1].bias.register_hook(noting("bias", 0.5))
    module[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    module[1].register_full_backward_hook(lambda m, i, o: (calls.append("module"), tuple(g * 2 for g in i))[1])

    def forward(x: Tensor) -> Tensor:
        h = module[0](x)
        h.register_hook(noting("tensor", 3.0))
        h = module[1](h)
        h.retain_grad()
        h = F.linear(h.view(-1, WIDTH), module[2].weight, module[2].bias)
        h.register_hook(noting("result of the product", 2.0))
        h.grad_fn.register_prehook(lambda gs: (calls.append("before the node"), tuple(g * 2 for g in gs))[1])
        h = F.linear(h, module[3].weight, module[3].bias)
        h.grad_fn.register_hook(
            lambda inputs, outputs: (
                calls.append("after the node"),
                tuple(g if g is None else g * 2 for g in inputs),
            )[1]
        )
        return h

    return module, forward


def test_every_hook_runs_once_and_its_result_counts():
    def step(backward: Callable[..., None]) -> tuple[list[str], list[Tensor | None]]:
        calls: list[str] = []
        module, forward = hooked(calls)
        record = Import(0, None)
        y = forward(enter(torch.randn(2, WIDTH), record))
        backward(y, torch.ones_like(y), record)
        return sorted(calls), [record.grad, *(parameter.grad for parameter in module.parameters())]

    expected_calls, expected = step(whole)
    calls, found = step(in_two)
    assert len(calls) == 8
    assert calls == expected_calls
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_checkpoint_is_recomputed_once():
    runs = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(1)
            return super().forward(x)

    module = Net(nn.Sequential(Counting(WIDTH, WIDTH), nn.Tanh()), checkpointed)
    run(module, in_two, repeats=1)
    assert len(runs) == 2


class Marked(torch.autograd.Function):
    """Copies a tensor to memory that tells when it is freed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, living: list[weakref.ref[Any]]) -> Tensor:
        memory = x.detach().numpy().copy()
        living.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def test_the_first_part_frees_all_but_the_inputs_of_products():
    layer, record = linear(), Import(0, None)
    squared: list[weakref.ref[Any]] = []
    multiplied: list[weakref.ref[Any]] = []
    result: list[weakref.ref[Any]] = []
    h = Marked.apply(enter(torch.randn(2, WIDTH), record), squared)
    h = Marked.apply(h.square(), multiplied)
    y = Marked.apply(layer(h), result).square()
    gc.disable()
    try:
        deferred = backward_of_imports([y], [torch.ones_like(y)], {record})
        del h
        assert [memory[0]() is not None for memory in (squared, multiplied, result)] == [False, True, False]
        deferred.run()
        assert multiplied[0]() is None
    finally:
        gc.enable()


def test_a_gradient_that_is_changed_in_place_before_its_use_is_an_error():
    first, second, record = linear(), linear(), Import(0, None)
    h = first(enter(torch.randn(2, WIDTH), record))
    h.register_hook(lambda gradient: seen.append(gradient))
    seen: list[Tensor] = []
    y = second(h)
    deferred = backward_of_imports([y], [torch.ones_like(y)], {record})
    seen[0].mul_(2)
    with pytest.raises(UnsupportedError, match=r"shape \[2, 8\] was changed in place"):
        deferred.run()


def test_nothing_left_is_false():
    assert not Deferred()
