"""Copies between an accelerator and the host, for messages: on streams of their own, overlapped with computation.

Messages between stages travel from host to host: gloo can do no other, and NCCL wants all messages of two ranks in one
order, which stages that run under different orders do not have. Copies go through page-locked memory, which torch
caches and reuses, and only users of the copied data wait for them:

* Outwards, the copy's stream waits for the work that is queued now, and a thread that sends waits for the copy.
* Inwards, a thread that has received starts the copy; a user of the tensor lets its own stream wait, not the host.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

from smp_strategy.distributed.device import current_stream, entered
from smp_strategy.distributed.torch_modes import outside_inference_mode

__all__ = ["HostCopies", "Landed", "OnHost"]


class OnHost(NamedTuple):
    """Copy to host memory that is under way."""

    memory: Tensor
    copied: torch.Event

    def wait(self) -> Tensor:
        """Block until the copy is done, and return it."""
        self.copied.synchronize()
        return self.memory


class Landed(NamedTuple):
    """Tensor that has arrived on the host, and perhaps is still being copied from there."""

    tensor: Tensor
    copied: torch.Event | None = None

    def use(self) -> Tensor:
        """Tensor for work that this thread queues from now on."""
        if self.copied is not None:
            stream = current_stream(self.tensor.device)
            assert stream is not None
            stream.wait_event(self.copied)
            # Its memory belongs to the stream of the copies: the allocator must not reuse it while this one reads it.
            self.tensor.record_stream(stream)
        return self.tensor


@final
class HostCopies:
    """Copies to and from a single device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Both ways at once: links carry as much in each direction.
        self._outwards, self._inwards = torch.Stream(device), torch.Stream(device)

    def memory(self, nbytes: int) -> Tensor:
        """Page-locked host memory, as bytes."""
        with outside_inference_mode():  # it may be filled outside of the mode that it is asked for in
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def out(self, tensor: Tensor) -> OnHost:
        """Begin to copy ``tensor``, which is contiguous and not changed any more, to the host."""
        now = current_stream(self._device)
        assert now is not None
        self._outwards.wait_stream(now)
        with outside_inference_mode(), torch.no_grad(), entered(self._outwards):
            memory = self.memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            memory.copy_(tensor, non_blocking=True)
            copied = self._outwards.record_event()
        tensor.record_stream(self._outwards)
        return OnHost(memory, copied)

    def back(self, memory: Tensor) -> Landed:
        """Begin to copy ``memory``, which is page-locked, to the device, with the same strides."""
        with outside_inference_mode(), torch.no_grad(), entered(self._inwards):
            tensor = torch.empty_strided(memory.shape, memory.stride(), dtype=memory.dtype, device=self._device)
            tensor.copy_(memory, non_blocking=True)
            return Landed(tensor, self._inwards.record_event())
