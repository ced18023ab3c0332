"""Units that change plain tensors in place, as blocks of normalizing flows add to a log determinant."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.testing import run_ranks

from .step_runs import engine_for
from .steps import WIDTH, Net, batch


class Coupling(nn.Module):
    """Adds the logarithm of its scales to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, z: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.net(z).tanh().chunk(2, dim=1)
        total += self.of_samples(scale.sum(dim=1))
        return z * scale.exp() + shift, total

    def of_samples(self, found: Tensor) -> Tensor:
        return found


class ByValue(Coupling):
    """Which samples it adds is known to its own stage only."""

    def of_samples(self, found: Tensor) -> Tensor:
        chosen = found[found > found.detach().mean()]
        return torch.zeros_like(found) + chosen.sum() / len(chosen)


class Counting(Coupling):
    """Keeps a mean of what it sees in a tensor that is not its own."""

    def forward(self, z: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        z, _ = super().forward(z, torch.zeros(len(z)))
        with torch.no_grad():
            mean.mul_(0.5).add_(z.mean())
        return z, mean


def through(net: Net, z: Tensor, total: Tensor) -> Tensor:
    for block in net.blocks:
        z, total = block(z, total)
    return z.square().mean() - 0.1 * total.mean()


def of_the_step(net: Net, x: Tensor) -> Tensor:
    return through(net, x, torch.zeros(len(x)))


def part_of_another(net: Net, x: Tensor) -> Tensor:
    both = torch.zeros(2, len(x))
    with torch.no_grad():
        return through(net, x, both[1]) + both.mean()


def a_buffer(net: Net, x: Tensor) -> Tensor:
    return through(net, x, net.count)


CASES: dict[str, tuple[Callable[[Net, Tensor], Tensor], type[nn.Module], tuple[str, ...]]] = {
    "training first": (of_the_step, Coupling, ("train", "eval", "train", "eval")),
    "evaluation first": (of_the_step, Coupling, ("eval", "train", "eval")),
    "view": (part_of_another, Coupling, ("eval", "eval")),
    "by value": (of_the_step, ByValue, ("eval", "eval")),
    "buffer": (a_buffer, Counting, ("train", "eval", "train", "eval")),
}


def mean_of(outputs: Any) -> Tensor:
    return torch.stack(list(outputs)).mean()


def run(name: str, pp: int) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    step, block, kinds = CASES[name]
    torch.manual_seed(0)
    net = Net(step, block)
    engine = engine_for(net, pp, microbatches=1 if name in ("buffer", "by value") else 2) if pp else None
    losses = []
    for number, kind in enumerate(kinds):
        given: Any = batch(number)
        if kind == "eval":
            with torch.no_grad():
                found = net.loss(given) if engine is None else mean_of(engine.eval_step(net.loss, given).outputs)
        elif engine is None:
            found = net.loss(given)
            found.backward()
        else:
            result = engine.train_step(net.loss, given, loss_of=lambda loss: loss)
            result.commit(torch.ones(()), reduce=True)
            found = result.loss
        losses.append(float(found.detach()))
    assert type(net.count) is Tensor
    return losses, net.count.clone(), {key: p.grad for key, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_a_unit_changes_a_plain_tensor_as_in_one_process(name):
    losses, count, gradients = run(name, 0)
    merged: dict[str, Tensor] = {}
    for found, kept, here in run_ranks(run, 2, name, 2):
        assert found == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(kept, count)
        merged |= here
    assert merged.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(merged[key], gradient, rtol=1e-5, atol=1e-7, msg=key)
