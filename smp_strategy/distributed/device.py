"""Device abstraction: the differences between a processor and an accelerator, in one place.

An accelerator works through the operations that the host has queued on its current stream, which is a thread's own,
like the current device; it has generators of its own; and the numbers of devices mean something in a single process
only. torch has these under one name for all kinds of accelerators, so nothing here depends on the kind.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["chosen", "current_stream", "device_name", "entered", "generator_of", "is_host", "local", "wait_for_all"]


def is_host(device: torch.device) -> bool:
    """Whether tensors on ``device`` are in the memory of the host."""
    return device.type == "cpu"


def chosen(device: torch.device | None) -> torch.device:
    """``device`` with its number, made the current one of this thread; the processor, if there is none."""
    if device is None or is_host(device):
        return torch.device("cpu")
    module: Any = torch.get_device_module(device)
    module.init()  # makes the generators
    index: int | None = device.index
    number = torch.accelerator.current_device_index() if index is None else index
    torch.accelerator.set_device_index(number)
    return torch.device(device.type, number)


def local(device: torch.device) -> torch.device:
    """Translate a ``device`` of another rank: its accelerator is the current one of this rank."""
    if device.index is None or is_host(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def current_stream(device: torch.device) -> torch.Stream | None:
    """Stream on which this thread queues work for ``device``; ``None``: work is not queued."""
    return None if is_host(device) else torch.accelerator.current_stream(device)


def entered(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Context in which work is queued on ``stream``, and its device is the current one."""
    return nullcontext() if stream is None else stream


def generator_of(device: torch.device) -> torch.Generator:
    """Default random generator of ``device``."""
    if is_host(device):
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    found: torch.Generator = torch.get_device_module(device).default_generators[index]
    return found


def device_name(device: torch.device) -> str:
    """Name of the model of ``device``; empty for the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def wait_for_all(device: torch.device) -> None:
    """Wait until everything that is queued for ``device`` is done."""
    if not is_host(device):
        torch.accelerator.synchronize(device)
