"""Steps that look at values, pass several times, or change from batch to batch and from microbatch to microbatch."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compare import REUSED, USES, WIDTH, Block, Blocks, Case, check, mean_square, steps_of

# Values in Python


def on_the_loss(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    loss = mean_square(h)
    if loss > 1.2:
        net.seen.append("large")
        loss = loss + mean_square(c(h))
    else:
        loss = loss * 2 + mean_square(d(h))
    if not loss.isfinite().all() or torch.isnan(loss):
        raise AssertionError
    net.seen.append(loss.item())
    return loss


def as_lists(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x)
    rows = h.detach().mean(0).tolist()
    for value in rows[:3]:
        h = h + value if value > 0 else h - torch.tensor([value] * WIDTH)
    h = b(h)
    net.seen.append([round(value, 4) for value in h.detach().sum(1).tolist()])
    return mean_square(d(c(h))) * max(h.max().item(), 1.0) + torch.tensor(h.std().item())


def while_large(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h, turns = a(x), 0
    while h.abs().max() > 1 and turns < 4:
        h = b(h) * 0.5
        turns += 1
    net.seen.append(turns)
    for _ in range(int(h.detach().abs().sum()) % 3):
        h = c(h)
    return mean_square(d(h))


class TooLargeError(Exception):
    pass


def with_exceptions(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x)
    try:
        h = b(h)
        if h.max() > 1.5:
            raise TooLargeError(f"{h.max():.3f}")
        h = c(h)
    except TooLargeError as error:
        net.seen.append(str(error))
        h = c(h.clamp(max=1.0))
    finally:
        h = h * 0.5
    try:
        [1, 2, 3][int(h.argmax())]
    except IndexError:
        h = h + 1
    return mean_square(d(h))


def through_numpy(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    values = h.detach().cpu().numpy()
    assert isinstance(values, np.ndarray)
    order = np.argsort(np.asarray(h.detach())[:, 0])
    scale = float(np.float32(values.std())) + np.asarray(h.detach().mean()).item()
    g = c(h[torch.from_numpy(order.copy())]) * scale
    return mean_square(d(g)) + torch.as_tensor(np.mean([h.sum().item(), 1.0]), dtype=h.dtype)


def printed(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    net.seen += [f"{h.mean():.4f} {h.shape}", str(h.detach()[0, :2]), repr(h[0, 0].detach())]
    print(h.detach()[:1], h.shape)
    loss = mean_square(d(c(h)))
    net.seen.append(f"{loss.item():.3f} {float(loss.detach()):.2f} {loss}")
    return loss


def python_numbers(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    scale, first = h.mean().item(), int(h.argmax())
    weights = torch.tensor([scale, 1.0 - scale, float(first)])
    table = {True: 1.0, False: 0.5}
    h = c(h * weights.sum() + table[bool(h.sum() > 0)])
    return mean_square(d(h)) + max(h.min(), h.max() - 10) + min(h.max().item(), 3)


# Several passes and losses


def several_passes(net: Any, x: Tensor) -> Tensor:
    first = second = x
    for block in net.blocks:
        first = block(first)
    for block in net.blocks:
        second = block(second + 0.1 * first.detach())
    return F.mse_loss(first, second) + mean_square(second)


def contrastive(net: Any, x: Tensor) -> Tensor:
    views = []
    for view in (x, x.flip(-1)):
        for block in net.blocks:
            view = block(view)
        views.append(F.normalize(view, dim=-1))
    logits = torch.cat(views) @ torch.cat(views).T / 0.5
    logits = logits.masked_fill(torch.eye(len(logits), dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(len(logits)).roll(len(x)))


def deep_supervision(net: Any, x: Tensor) -> Tensor:
    total = 0.0
    for number, block in enumerate(net.blocks):
        x = block(x)
        total = total + mean_square(x) / (number + 1)
    return total


def by_attribute(net: Any, x: Tensor) -> Tensor:
    """Features and losses are put on the module and found there."""
    net.losses = []
    for block in net.blocks:
        x = block(x)
        net.losses.append(mean_square(x))
        net.latest = x
    return torch.stack(net.losses).mean() + net.latest.abs().mean()


def loss_of_late_units(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x)).detach()
    return mean_square(d(c(h)))


def loss_of_early_units(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    net.seen.append(d(c(h)).detach().mean().item())
    return mean_square(h)


def loss_of_middle_units(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = c(b(a(x).detach()))
    d(h)
    return mean_square(h)


def with_autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for block in net.blocks:
            x = block(x)
        loss = mean_square((x @ x.T).float())
    with torch.autocast("cpu", enabled=False):
        return loss + mean_square(net.blocks[0](x.float()))


def kept_and_detached(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    loss = mean_square(d(c(b(a(x)))))
    net.seen.append(round(loss.detach().item(), 4))
    return loss / loss.detach().clamp(min=0.1)


def modes(net: Any, x: Tensor) -> Tensor:
    """Gradients and training switched on and off on the way."""
    a, b, c, d = net.blocks
    h = a(x)
    with torch.no_grad():
        target = b(h)
        assert not target.requires_grad
        with torch.enable_grad():
            h = b(h)
            assert h.requires_grad
    net.eval()
    with torch.inference_mode():
        level = c(h).abs().mean().item()
    net.train()
    torch.set_grad_enabled(True)
    return F.mse_loss(d(c(h)), target) * level


STEPS = {
    **steps_of([on_the_loss, as_lists, through_numpy, printed, python_numbers], differs=USES),
    **steps_of([while_large, with_exceptions, several_passes, contrastive], differs=REUSED),
    **steps_of([deep_supervision, by_attribute, with_autocast], differs=USES),
    **steps_of([loss_of_late_units, loss_of_early_units, loss_of_middle_units, kept_and_detached]),
    **steps_of([modes], differs=REUSED),
}


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(STEPS[name], pp)


# Shapes that change


class Changing(Blocks):
    """Other lengths and other numbers of samples in every batch, among them fewer than there are microbatches."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        samples, length = torch.randint(3, 10, (2,), generator=generator).tolist()
        return {"x": torch.randn(samples, length, WIDTH, generator=generator)}


def cut_to_length(net: Any, x: Tensor) -> Tensor:
    """A length that depends on the values of the microbatch."""
    a, b, c, d = net.blocks
    x = x[:, : 1 + int(x[0, 0, 0].abs() * 10) % x.size(1)]
    h = b(a(x))
    h = h[:, : max(1, int(h.detach().abs().max()))]
    return mean_square(d(c(h)))


def in_rows(net: Any, x: Tensor) -> Tensor:
    """As many calls as there are samples."""
    rows = []
    for row in x:
        for block in net.blocks:
            row = block(row)
        rows.append(row.mean())
    return torch.stack(rows).mean()


CHANGING = {
    "values decide the length": Case(lambda: Changing(cut_to_length)),
    "one call for each sample": Case(lambda: Changing(in_rows), REUSED),
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CHANGING)
def test_shapes_that_change_have_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(CHANGING[name], pp)


# Networks beside the network


class Target(nn.Module):
    """BYOL: a frozen copy predicts the target."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.ModuleList(Block() for _ in range(4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        online = target = batch["x"]
        for block in self.online:
            online = block(online)
        with torch.no_grad():
            for block in self.target:
                target = block(target)
        return 2 - 2 * F.cosine_similarity(self.predictor(online), target).mean()

    batch = staticmethod(Blocks.batch)


class Penalized(nn.Module):
    """WGAN-GP within a unit: its gradient for its input is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.ModuleList(Block() for _ in range(3))
        self.critic = Critic()

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.generator:
            x = block(x)
        score, penalty = self.critic(x)
        return score + 10 * penalty

    batch = staticmethod(Blocks.batch)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        point = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(point).sum(), point, create_graph=True)
        return self.net(x).mean(), (gradient.norm(dim=1) - 1).square().mean()


NETWORKS = {"target network": Case(Target), "gradient penalty": Case(Penalized)}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_beside_the_network_have_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(NETWORKS[name], pp)
