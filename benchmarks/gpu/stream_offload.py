"""Offload of all that autograd saves, as torchtune does it: hooks, one stream, and the latest few tensors held on to.

What an operation saves is copied to page-locked memory on a stream beside; the tensor on the device is let go of when
the copies of a few later ones have begun. Backward copies back on the same stream when it asks, and its own waits.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["StreamOffload"]

LEAST_BYTES, HELD = 1024, 5

Packed = Tensor | tuple[Tensor, torch.device]


class StreamOffload(saved_tensors_hooks):
    """A context for forward.

    Args:
        device: where tensors are; on a CPU they are copied without streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._held: deque[tuple[Tensor, torch.Event]] = deque()
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Packed:
        if tensor.nbytes < LEAST_BYTES or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        if self._stream is None:
            return tensor.detach().clone(), tensor.device
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        while len(self._held) >= HELD:
            torch.accelerator.current_stream().wait_event(self._held.popleft()[1])
        self._held.append(
            (tensor.detach(), self._on_stream(self._stream, lambda: host.copy_(tensor, non_blocking=True)))
        )
        return host, tensor.device

    def _unpack(self, packed: Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        host, device = packed
        if self._stream is None:
            return host
        self._held.clear()
        now = torch.accelerator.current_stream(device)
        tensor = torch.empty_like(host, device=device)
        now.wait_event(self._on_stream(self._stream, lambda: tensor.copy_(host, non_blocking=True)))
        return tensor

    @staticmethod
    def _on_stream(stream: torch.Stream, copy: Callable[[], object]) -> torch.Event:
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream:
            copy()
            return stream.record_event()
