"""Copies between a device and the host, beside what the device computes.

Devices do what the host queues, one thing after the other in each *stream*. Copies to the host have a stream, copies
to the device another, so that both directions of the link are in use while the device computes. The host never waits:
where something must come after something else, streams wait for each other at *moments* (events).

On a CPU a copy is done when the call returns. The code above is the same.
"""

from typing import Protocol, final

import torch
from torch import Tensor

__all__ = ["CopyStream", "StreamEvent", "copies_of"]


class StreamEvent(Protocol):
    """A place in the work of a stream."""

    def query(self) -> bool:
        """Whether the device has come there."""


class CopyStream(Protocol):
    """Copies of bytes. Tensors have the type ``uint8`` and one dimension."""

    device: torch.device
    """Where tensors are that are copied to the host."""

    def host_memory(self, nbytes: int) -> Tensor:
        """Memory on the host that can be copied to and from."""

    def now(self) -> StreamEvent:
        """Everything is computed that has been asked for by now."""

    def store(self, source: Tensor, target: Tensor, *, after: list[StreamEvent]) -> StreamEvent:
        """Begin to copy ``source``, on the device, to the host. Returns when that is done."""

    def load(self, source: Tensor, *, after: list[StreamEvent]) -> tuple[Tensor, StreamEvent]:
        """Begin to copy ``source``, on the host, to new memory of the device. Returns it, and when it may be read."""

    def wait(self, moment: StreamEvent) -> None:
        """Let what is asked for from now on be computed after ``moment``, and the memory freed before be free then."""


def copies_of(device: torch.device) -> CopyStream:
    """Those between ``device`` and the host."""
    return _PlainCopies() if device.type == "cpu" else _StreamCopies(device)


@final
class _Past:
    def query(self) -> bool:
        return True


@final
class _PlainCopies:
    """On a CPU."""

    device = torch.device("cpu")

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def now(self) -> StreamEvent:
        return _Past()

    def store(self, source: Tensor, target: Tensor, *, after: list[StreamEvent]) -> StreamEvent:
        target.copy_(source)
        return _Past()

    def load(self, source: Tensor, *, after: list[StreamEvent]) -> tuple[Tensor, StreamEvent]:
        return source.clone(), _Past()

    def wait(self, moment: StreamEvent) -> None:
        pass


@final
class _StreamCopies:
    """On an accelerator, whichever."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._outward = torch.Stream(device)
        self._inward = torch.Stream(device)

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def now(self) -> torch.Event:
        return self._computing.record_event()

    def store(self, source: Tensor, target: Tensor, *, after: list[StreamEvent]) -> StreamEvent:
        return self._copy(self._outward, source, target, after)

    def load(self, source: Tensor, *, after: list[StreamEvent]) -> tuple[Tensor, StreamEvent]:
        # Of the stream that computes: that is where it is used and freed. What had this memory before was, too.
        target = torch.empty(source.shape, dtype=torch.uint8, device=self.device)
        return target, self._copy(self._inward, source, target, [*after, self.now()])

    def wait(self, moment: StreamEvent) -> None:
        assert isinstance(moment, torch.Event)
        self._computing.wait_event(moment)

    @property
    def _computing(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def _copy(self, stream: torch.Stream, source: Tensor, target: Tensor, after: list[StreamEvent]) -> torch.Event:
        for moment in after:
            assert isinstance(moment, torch.Event)
            stream.wait_event(moment)
        with stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()
