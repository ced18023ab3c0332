"""Memory and events of a device that another process uses, on the same machine (CUDA IPC).

A process exports memory as bytes, another one opens it, and both read and write it. Events go from process to process
in the same way. One rule decides about correctness: *an event is recorded before the other process is told of the
message*, because an event that was never recorded counts as reached.

The receiver opens the memory as if it were its own device's, whichever it is. Addresses are unique in a machine, so
copies find it; and a copy between *two* devices would make PyTorch wait for the current streams of both.

PyTorch exports the memory of its allocator (:mod:`~smp_strategy.distributed.torch_private`), and keeps what is exported
until the other process has dropped it. So exported memory should be used again and not be freed.
"""

import pickle
from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.distributed.device import current_stream, entered
from smp_strategy.distributed.host_copies import HostCopies, Landed, StreamEvent
from smp_strategy.distributed.torch_modes import outside_inference_mode
from smp_strategy.distributed.torch_private import export_device_memory, open_device_memory

__all__ = ["CudaIpc", "DeviceIpc"]


class DeviceIpc(ABC):
    """Device operations of one rank, for messages through memory of the device."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Tensor:
        """New memory of the device, as ``uint8``."""

    @abstractmethod
    def export(self, memory: Tensor) -> bytes:
        """Name of ``memory`` for other processes."""

    @abstractmethod
    def open(self, exported: bytes) -> Tensor:
        """Memory that another process has exported."""

    @abstractmethod
    def new_event(self) -> tuple[StreamEvent, bytes]:
        """New event, and its name for other processes."""

    @abstractmethod
    def open_event(self, exported: bytes) -> StreamEvent:
        """Event of another process."""

    @abstractmethod
    def write(self, source: Tensor, target: Tensor, written: StreamEvent) -> None:
        """Copy ``source`` to ``target``, after what this thread has queued so far, and record ``written`` after it."""

    @abstractmethod
    def read(self, source: Tensor, strides: tuple[int, ...], written: StreamEvent) -> Landed:
        """Begin to copy ``source``, after the event ``written``, to a new tensor with these ``strides``.

        The caller keeps ``source`` alive, and lets nobody write to it, until the copy has been made.
        """


@final
class CudaIpc(DeviceIpc):
    """The operations of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, HostCopies(device)

    def allocate(self, nbytes: int) -> Tensor:
        with outside_inference_mode():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def export(self, memory: Tensor) -> bytes:
        return pickle.dumps(export_device_memory(memory))

    def open(self, exported: bytes) -> Tensor:
        return open_device_memory(pickle.loads(exported), self._device)

    def new_event(self) -> tuple[StreamEvent, bytes]:
        with entered(current_stream(self._device)):  # an event belongs to the current device
            event: Any = torch.cuda.Event(interprocess=True)
            return event, event.ipc_handle()

    def open_event(self, exported: bytes) -> StreamEvent:
        event: StreamEvent = torch.cuda.Event.from_ipc_handle(self._device, exported)
        return event

    def write(self, source: Tensor, target: Tensor, written: Any) -> None:
        with torch.no_grad():
            target.copy_(source)
        written.record()

    def read(self, source: Tensor, strides: tuple[int, ...], written: StreamEvent) -> Landed:
        return self._copies.bring(source, strides, written)
