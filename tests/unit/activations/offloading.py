"""Calls of units that save what is known, and what an offload does about them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smp_strategy.activations.offload import Offload
from tests.unit.activations.double import Device

__all__ = ["NBYTES", "WIDTH", "chain", "done", "gradient", "leaf", "of_kind", "offload_on", "run", "saving", "squaring"]

WIDTH = 64
# What `saving` saves for backward.
NBYTES = WIDTH * WIDTH * 4


def offload_on(device: Any, horizon: int = 1, min_bytes: int = 1, **options: Any) -> Offload:
    return Offload(device, horizon=horizon, min_bytes=min_bytes, **options)


def saving(x: Tensor) -> Tensor:
    """Saves its result, and nothing else."""
    return torch.tanh(x)


def squaring(x: Tensor) -> Tensor:
    """Saves its argument, and nothing else."""
    return x.pow(2)


def leaf() -> Tensor:
    return torch.randn(WIDTH, WIDTH, requires_grad=True)


def done(device: Device, offload: Offload) -> None:
    """All copies are done, and the host has seen it."""
    device.work()
    offload.reach(0)
    device.work()
    offload.reach(0)


def of_kind(log: list[str], kind: str) -> list[str]:
    return [line for line in log if line.startswith(kind)]


def chain(offload: Offload, functions: list[Callable[..., Any]], x: Tensor, place: tuple[int, int] = (0, 0)) -> Tensor:
    for function in functions:
        x = run(offload, function, place, x)
    return x


def run(offload: Offload, function: Callable[..., Any], place: tuple[int, int], x: Tensor) -> Any:
    """A call of a unit."""
    offload.enter(place)
    result = offload.around(function)(x)
    offload.enter(None)
    return result


def gradient(functions: list[Callable[..., Any]], x: Tensor) -> Tensor:
    y = x
    for function in functions:
        y = function(y)
    return torch.autograd.grad(y.sum(), x)[0]
