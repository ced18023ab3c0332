"""Directed edge whose messages match by their order: NCCL, with a communicator of its own.

NCCL knows no tags. The first send of a communicator meets the first receive, whatever they are about, and a send that
has no receive holds up all later ones. So an edge, the pair of a sender and a receiver, has a communicator and a stream
that nothing else uses, and whoever calls it must make both ends agree on one order
(:mod:`smp_strategy.pipeline.transport.device_channels.message_order`).
"""

from abc import ABC, abstractmethod
from threading import Lock
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.device import current_stream
from smp_strategy.distributed.host_copies import Landed
from smp_strategy.distributed.torch_modes import outside_inference_mode

__all__ = ["NcclEdge", "OrderedEdge", "nccl_options"]

MOST_BLOCKS: Final = 4
"""Thread blocks (CTAs) of a transfer. Those of all edges must fit on the device beside the kernels that compute."""


class OrderedEdge(ABC):
    """One end of an edge: the sender calls :meth:`send` only, the receiver :meth:`receive` only."""

    @abstractmethod
    def send(self, message: Tensor) -> None:
        """Queue the next send, after what this thread has queued so far.

        Args:
            message: ``uint8`` on the device, contiguous, and no longer modified.
        """

    @abstractmethod
    def receive(self, nbytes: int) -> Landed:
        """Queue the next receive, of ``nbytes``, as ``uint8``."""

    @abstractmethod
    def close(self, *, is_broken: bool = False) -> None:
        """End the edge, of which nothing is used afterwards.

        Args:
            is_broken: whether the other end may be gone; else all that is queued is over first. What waits for the
                other end on the device is broken off, and its memory has no defined content.
        """


@final
class NcclEdge(OrderedEdge):
    """Edge over a process group of two ranks.

    The first call at each end makes the communicator and blocks until the other end does so too.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device, self._group = device, group
        self._stream: Any = torch.Stream(device)
        self._lock = Lock()

    def send(self, message: Tensor) -> None:
        computing: Any = current_stream(self._device)
        computed = computing.record_event()
        with self._lock, self._stream:
            self._stream.wait_event(computed)
            # The wait is that of this stream, not of the host: so the memory is used until the stream is here.
            self._group.send([message], self._other, 0).wait()
        message.record_stream(self._stream)

    def receive(self, nbytes: int) -> Landed:
        with outside_inference_mode(), torch.no_grad(), self._lock, self._stream:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._group.recv([memory], self._other, 0).wait()
            return Landed(memory, self._stream.record_event())

    def close(self, *, is_broken: bool = False) -> None:
        if not is_broken:
            self._stream.synchronize()
        self._group.abort()  # unlike `shutdown`, it does not wait for the other end

    @property
    def _other(self) -> int:
        """Rank of the other end in the group."""
        return 1 - self._group.rank()


def nccl_options() -> Any:
    """Options of an edge's group: few thread blocks, because an edge carries one message at a time."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, MOST_BLOCKS
    return options
