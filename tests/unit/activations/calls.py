"""Calls of modules whose activations are treated, without an engine around them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.activations.unit_wrapper import UnitCall, UnitWrapper
from smp_strategy.distributed.rng_state import replay_from_now

__all__ = ["ALL", "CHEAP", "WIDTH", "Counting", "Mlp", "gradients", "numbers", "treated"]

WIDTH = 4
ALL = ActivationPolicy(recompute="all")
CHEAP = ActivationPolicy(recompute="cheap")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Counting(nn.Module):
    """Runs a module and counts how often."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.runs: list[int] = []
        self.own = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.own += 1
        return self.inner(*args, **kwargs)


def treated(
    module: nn.Module,
    policy: ActivationPolicy = ALL,
    *,
    activations: UnitWrapper | None = None,
    name: str = "blocks.0",
    **about: Any,
) -> Callable[..., Any]:
    """``module`` as a stage calls it."""
    activations = activations or UnitWrapper()
    device = torch.device("cpu")

    def call(*args: Any, **kwargs: Any) -> Any:
        if policy.is_default or not torch.is_grad_enabled():
            return module(*args, **kwargs)
        unit = UnitCall(name, module, 0, **{"random": replay_from_now(device), **about})
        return activations.recomputed(unit, policy, functools.partial(module))(*args, **kwargs)

    return call


def numbers(module: nn.Module, call: Callable[..., Any], step: Callable[[Callable[..., Any]], Tensor]) -> list[Any]:
    """Train ``module`` for two steps; returns losses, weights and buffers."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = step(call)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, *(tensor.tolist() for tensor in module.state_dict().values())]


def gradients(module: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in module.parameters()]
