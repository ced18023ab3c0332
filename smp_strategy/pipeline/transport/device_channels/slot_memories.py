"""Memory of slots: page-locked and shared by two ranks of a machine, or of the device and opened by both (CUDA IPC).

Both have a block in the sender's arena (:mod:`smp_strategy.distributed.shared_arena`), which begins with the flag::

    page-locked      flag ... | the tensor
    CUDA IPC         flag, lengths, names of memory and event

*Page-locked*: the sender's device copies into the block, and the header follows when the host knows that the copy has
been made. The receiver's device copies out of it. So a tensor crosses the bus once in each direction.

*CUDA IPC*: the sender copies within its device, on the stream that computes, and records the event of the slot; then
comes the header. The receiver's copy waits for the event on the device and fetches the tensor over NVLink or PCIe, or
within the device that both use. The copy at the sender is the one that keeps later changes of the tensor from the
message, which every path needs. As the sender owns the memory, it can make more without asking.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

import torch
from torch import Tensor

from smp_strategy.distributed.device_paths.device_ipc import DeviceIpc
from smp_strategy.distributed.host_copies import HostCopies, Landed, StreamEvent
from smp_strategy.distributed.shared_arena import Arena, PeerArena
from smp_strategy.distributed.torch_modes import outside_inference_mode
from smp_strategy.pipeline.transport.device_channels.slots import CONTROL_BYTES, MessageSlot

__all__ = ["IpcSlots", "PageLockedSlots", "SlotMemory"]

_LENGTHS: Final = "=8x2q"
"""Of a slot in memory of the device: room for the flag, then the lengths of both names."""


class SlotMemory(ABC):
    """A kind of memory for the slots between this rank and another.

    Attributes:
        name: name of the path.
        least_bytes: size from which a tensor takes it.
        most_bytes: bytes of slots for one receiver.
    """

    name: str
    least_bytes: int
    most_bytes: int

    @abstractmethod
    def new(self, nbytes: int) -> MessageSlot:
        """New slot of this rank; raises ``RuntimeError`` if there is no memory."""

    @abstractmethod
    def open(self, start: int, nbytes: int) -> MessageSlot:
        """MessageSlot of the other rank."""

    @abstractmethod
    def fill(self, slot: MessageSlot, tensor: Tensor, target: Tensor) -> StreamEvent | None:
        """Begin to copy ``tensor`` to ``target``, which has the memory of ``slot``.

        Later changes of ``tensor`` do not reach it.

        Returns:
            Event that has to be reached before the header is sent; ``None``: it may be sent at once.
        """

    @abstractmethod
    def fetch(self, slot: MessageSlot, source: Tensor, strides: tuple[int, ...]) -> Landed:
        """Begin to copy ``source``, which has the memory of ``slot``, to a new tensor with these ``strides``."""

    @abstractmethod
    def close(self) -> None:
        """End the use of all slots, which no copy uses any more."""


@final
class PageLockedSlots(SlotMemory):
    """Slots in memory of the host that both ranks have page-locked."""

    name = "shared page-locked memory"
    # Not measured: about where copies over gloo's socket take longer than the wake-ups of a message.
    least_bytes = 1 << 16
    most_bytes = 1 << 32

    def __init__(
        self,
        own: Arena,
        theirs: PeerArena,
        copies: HostCopies,
        lock: Callable[[Tensor], None],
        unlock: Callable[[Tensor], None],
    ) -> None:
        self._own, self._theirs, self._copies = own, theirs, copies
        self._lock, self._unlock = lock, unlock
        self._locked: list[Tensor] = []

    def new(self, nbytes: int) -> MessageSlot:
        start = self._own.allocate(CONTROL_BYTES + nbytes)
        return self._slot(start, self._own.view(start, CONTROL_BYTES + nbytes), is_new=True)

    def open(self, start: int, nbytes: int) -> MessageSlot:
        return self._slot(start, _block(self._theirs, start, CONTROL_BYTES + nbytes))

    def fill(self, slot: MessageSlot, tensor: Tensor, target: Tensor) -> StreamEvent | None:
        return self._copies.out_to(self._copies.snapshot(tensor, target.stride()), target)

    def fetch(self, slot: MessageSlot, source: Tensor, strides: tuple[int, ...]) -> Landed:
        return self._copies.bring(source, strides)

    def close(self) -> None:
        while self._locked:
            with suppress(RuntimeError):  # the device has failed
                self._unlock(self._locked.pop())

    def _slot(self, start: int, block: Tensor, *, is_new: bool = False) -> MessageSlot:
        control, memory = block[:CONTROL_BYTES], block[CONTROL_BYTES:]
        self._lock(memory)
        self._locked.append(memory)
        if is_new:
            control[0] = 1
        return MessageSlot(start, control, memory)


@final
class IpcSlots(SlotMemory):
    """Slots in memory of the sender's device."""

    name = "CUDA IPC"
    # Not measured: a message through a slot costs each side some calls of the driver, and no wait for the device.
    least_bytes = 1 << 12
    most_bytes = 1 << 29

    def __init__(self, own: Arena, theirs: PeerArena, ipc: DeviceIpc) -> None:
        self._own, self._theirs, self._ipc = own, theirs, ipc

    def new(self, nbytes: int) -> MessageSlot:
        memory = self._ipc.allocate(nbytes)
        written, event = self._ipc.new_event()
        names = self._ipc.export(memory), event
        start = self._own.allocate(CONTROL_BYTES)
        control = self._own.view(start, CONTROL_BYTES)
        told = struct.pack(_LENGTHS, *map(len, names)) + b"".join(names)
        if len(told) > CONTROL_BYTES:
            raise RuntimeError(f"the name of memory of the device is too long: {len(told)} bytes")
        control[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        control[0] = 1
        return MessageSlot(start, control, memory, written)

    def open(self, start: int, nbytes: int) -> MessageSlot:
        control = _block(self._theirs, start, CONTROL_BYTES)
        told = control.numpy().tobytes()
        begin = struct.calcsize(_LENGTHS)
        of_memory, of_event = struct.unpack_from(_LENGTHS, told)
        memory = self._ipc.open(told[begin : begin + of_memory])
        written = self._ipc.open_event(told[begin + of_memory : begin + of_memory + of_event])
        return MessageSlot(start, control, memory, written)

    def fill(self, slot: MessageSlot, tensor: Tensor, target: Tensor) -> StreamEvent | None:
        assert slot.written is not None
        self._ipc.write(tensor, target, slot.written)
        return None

    def fetch(self, slot: MessageSlot, source: Tensor, strides: tuple[int, ...]) -> Landed:
        assert slot.written is not None
        return self._ipc.read(source, strides, slot.written)

    def close(self) -> None:
        pass


def _block(arena: PeerArena, start: int, nbytes: int) -> Tensor:
    """Block of another rank's arena as ``uint8``, which is given back with the last tensor that has its memory."""
    with outside_inference_mode():
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(arena.take(start, nbytes))
