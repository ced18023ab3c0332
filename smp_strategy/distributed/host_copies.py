"""Asynchronous copies between a device and the host, on streams of their own.

Offloaded activations, messages between stages, collectives staged through the host and checkpoints copy with these. A
device executes the work queued on a *stream* in order. Copies to the host have one stream, copies to the device
another, so both directions of the link are used while the device computes. Streams wait for each other at *events*;
the host waits only where it reads the bytes itself.

:class:`HostCopies` has two pairs of methods, which differ in who owns the memory [1] and in which stream it belongs
to [2]::

            to the host   to the device   memory
    buffers   store         load          [1] the caller's, kept until the event; [2] the computing stream's
    tensors   out, out_to   back, bring   [1] torch's caching allocators';        [2] the copying stream's

Messages need the second pair: a thread that receives starts the copy to the device and must not wait for what the
computing stream has queued; whoever uses the tensor lets the stream wait. ``out_to`` and ``bring`` are for memory that
another process reads or has written.

On a CPU a copy has finished when the call returns; the code is the same.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from smp_strategy.distributed.device import current_stream, is_host
from smp_strategy.distributed.torch_modes import outside_inference_mode

__all__ = ["HostCopies", "Landed", "OnHost", "StreamEvent"]


class StreamEvent(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Block the host until the device has reached it."""

    def wait(self) -> None:
        """Order what this thread queues from now on, on its current stream, after it."""


class OnHost(NamedTuple):
    """A copy to host memory that is under way."""

    memory: Tensor
    copied: StreamEvent

    def wait(self) -> Tensor:
        """Block until the copy has finished."""
        self.copied.synchronize()
        return self.memory


class Landed(NamedTuple):
    """A received tensor, whose copy to the device may still be under way."""

    tensor: Tensor
    copied: StreamEvent | None = None

    def use(self) -> Tensor:
        """The tensor, for work that this thread queues from now on."""
        if self.copied is not None:
            stream = _computing_on(self.tensor.device)
            stream.wait_event(self.copied)
            # Its memory belongs to the copying stream: it must not be reused while this one still reads it.
            _record_use(self.tensor, stream)
        return self.tensor


@final
class HostCopies:
    """Copies between one device and the host.

    Attributes:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._outwards, self._inwards = _new_stream(device), _new_stream(device)
        # A stream remembers in itself what to return to on exit, so two threads that receive must not enter it at once.
        self._receiving = Lock()

    def memory(self, nbytes: int) -> Tensor:
        """Host memory as ``uint8``; page-locked if the device is an accelerator."""
        with outside_inference_mode():  # it may be filled outside of the mode in which it is allocated
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=not is_host(self.device))

    def now(self) -> StreamEvent:
        """Event after all computation that this thread has queued so far."""
        event: StreamEvent = _computing_on(self.device).record_event()
        return event

    def wait(self, event: StreamEvent) -> None:
        """Order all computation queued from now on, and the reuse of memory freed so far, after ``event``."""
        _computing_on(self.device).wait_event(event)

    def store(self, source: Tensor, target: Tensor, *, after: list[StreamEvent]) -> StreamEvent:
        """Begin to copy ``source``, on the device, to ``target``, on the host. The caller keeps both alive.

        Returns:
            Event after the copy.
        """
        return _copy(self._outwards, source, target, after)

    def load(self, source: Tensor, *, after: list[StreamEvent]) -> tuple[Tensor, StreamEvent]:
        """Begin to copy ``source``, which is contiguous, from the host to new memory of the device.

        Returns:
            The new tensor, and the event after which it may be read (:meth:`wait`).
        """
        # Allocated on the computing stream, where it is used and freed. The previous owner of this memory was used
        # there too, hence `now`.
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        return target, _copy(self._inwards, source, target, [*after, self.now()])

    def snapshot(self, tensor: Tensor, strides: Sequence[int]) -> Tensor:
        """Copy ``tensor`` within its device, with these ``strides``, after what this thread has queued so far."""
        with outside_inference_mode(), torch.no_grad():
            copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
            return copy.copy_(tensor)

    def out(self, tensor: Tensor) -> OnHost:
        """Begin to copy ``tensor``, which is contiguous and no longer modified, to new page-locked memory."""
        with outside_inference_mode():
            memory = self.memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return OnHost(memory, self.out_to(tensor, memory))

    def out_to(self, tensor: Tensor, memory: Tensor) -> StreamEvent:
        """Begin to copy ``tensor``, which is no longer modified, to ``memory`` of the host, which the caller keeps.

        Returns:
            Event after the copy.
        """
        with outside_inference_mode(), torch.no_grad():
            copied = _copy(self._outwards, tensor, memory, [self.now()])
        _record_use(tensor, self._outwards)
        return copied

    def back(self, memory: Tensor) -> Landed:
        """Begin to copy ``memory``, which is page-locked, to a new tensor with the same strides on the device."""
        return self.bring(memory, memory.stride())

    def bring(self, source: Tensor, strides: Sequence[int], after: StreamEvent | None = None) -> Landed:
        """Begin to copy ``source`` to a new tensor on the device.

        Args:
            source: tensor of a device, or of the host; PyTorch keeps memory that it has allocated until the event, and
                the caller keeps other memory.
            strides: strides of the new tensor.
            after: event before which ``source`` must not be read, also one of another process.
        """
        with outside_inference_mode(), torch.no_grad(), self._receiving, self._inwards:
            if after is not None:
                after.wait()
            # Allocated on the copying stream: the copy waits for nothing that computes.
            tensor = torch.empty_strided(source.shape, strides, dtype=source.dtype, device=self.device)
            tensor.copy_(source, non_blocking=True)
            if not is_host(source.device):
                _record_use(source, self._inwards)
            return Landed(tensor, self._inwards.record_event())


@final
class _Reached:
    """The event of a CPU, which has always been reached."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self) -> None:
        pass


@final
class _HostStream:
    """The stream of a CPU, where work is done when the call returns."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def record_event(self) -> StreamEvent:
        return _Reached()

    def wait_event(self, event: StreamEvent) -> None:
        pass


# `Any` for `torch.Stream | _HostStream`: torch declares only its own events as arguments of `wait_event`.
def _new_stream(device: torch.device) -> Any:
    return _HostStream() if is_host(device) else torch.Stream(device)


def _computing_on(device: torch.device) -> Any:
    stream = current_stream(device)
    return _HostStream() if stream is None else stream


def _copy(stream: Any, source: Tensor, target: Tensor, after: list[StreamEvent]) -> StreamEvent:
    for event in after:
        stream.wait_event(event)
    with stream:
        target.copy_(source, non_blocking=True)
    copied: StreamEvent = stream.record_event()
    return copied


def _record_use(tensor: Tensor, stream: Any) -> None:
    """Keep the allocator from reusing the memory of ``tensor`` before the work queued on ``stream`` is done."""
    if not is_host(tensor.device):
        tensor.record_stream(stream)
