"""Slots: memory that a sender fills for one receiver, again and again.

The sender owns a slot and lends it with a message. When the receiver has copied the tensor out of it, it sets the flag
of the slot, a byte of memory that both map, and the sender may fill the slot again. Neither waits for the other: with
no slot free the sender makes another one, up to a limit, and beyond that the message takes another way.

The receiver sets the flag once it *knows* that its device has made the copy. So the sender's device never waits for the
receiver's.
"""

from collections.abc import Callable
from threading import Lock
from typing import Final, final

from torch import Tensor

from smp_strategy.distributed.host_copies import StreamEvent

__all__ = ["CONTROL_BYTES", "LentSlots", "MessageSlot", "SlotPool"]

CONTROL_BYTES: Final = 1 << 14
"""Size of the memory of a slot that both ranks map: the flag, then what the kind of memory needs."""
_STEPS_PER_DOUBLING: Final = 4


@final
class MessageSlot:
    """A slot, at the sender or the receiver.

    Args:
        start: start of its block in the sender's arena, its name for the other rank.
        control: first :data:`CONTROL_BYTES` of the block.
        memory: memory for a tensor, as ``uint8``.
        written: event after the copy into the memory; ``None``: the header follows the copy.
    """

    def __init__(self, start: int, control: Tensor, memory: Tensor, written: StreamEvent | None = None) -> None:
        self.start, self.memory, self.written = start, memory, written
        self._flag = control.numpy()[:1]

    @property
    def is_free(self) -> bool:
        """Whether the receiver has given it back."""
        return bool(self._flag[0])

    def lend(self) -> None:
        """Begin a message; the sender's."""
        self._flag[0] = 0

    def give_back(self) -> None:
        """End a message; the receiver's."""
        self._flag[0] = 1


@final
class SlotPool:
    """Slots of a sender for one receiver.

    Args:
        make: makes a slot of that many bytes.
        most_bytes: bytes up to which slots are made; the first one may exceed it.

    Attributes:
        num_lacking: messages for which there was no slot.
        error: the last error of ``make``, after which messages go on without a slot.
    """

    def __init__(self, make: Callable[[int], MessageSlot], most_bytes: int) -> None:
        self._make, self._most_bytes = make, most_bytes
        self.slots: list[MessageSlot] = []
        self.num_lacking = 0
        self.error: RuntimeError | None = None

    def prepare(self, nbytes: int) -> None:
        """Make the first slot; raises the error of ``make``."""
        self.slots.append(self._make(_rounded(nbytes)))

    def lend(self, nbytes: int) -> MessageSlot | None:
        """Lend the smallest free slot of at least ``nbytes``, or a new one; ``None``: there is none."""
        free = [slot for slot in self.slots if slot.memory.nbytes >= nbytes and slot.is_free]
        slot = min(free, key=lambda each: each.memory.nbytes) if free else self._new(_rounded(nbytes))
        if slot is None:
            self.num_lacking += 1
        else:
            slot.lend()
        return slot

    def _new(self, nbytes: int) -> MessageSlot | None:
        if self.slots and sum(slot.memory.nbytes for slot in self.slots) + nbytes > self._most_bytes:
            return None
        try:
            slot = self._make(nbytes)
        except RuntimeError as error:  # no memory
            self.error = error
            return None
        self.slots.append(slot)
        return slot


@final
class LentSlots:
    """Slots of another rank, opened by the start of their block and their bytes, and other memory that copies still
    read. Any thread may call it.
    """

    def __init__(self, open_slot: Callable[[int, int], MessageSlot]) -> None:
        self._open = open_slot
        self.slots: dict[int, MessageSlot] = {}
        self._busy: list[tuple[StreamEvent, Callable[[], None]]] = []
        self._lock = Lock()

    def at(self, start: int, nbytes: int) -> MessageSlot:
        """The slot whose block begins at ``start``, opened at its first message."""
        with self._lock:
            if start not in self.slots:
                self.slots[start] = self._open(start, nbytes)
            return self.slots[start]

    def call_after(self, copied: StreamEvent | None, then: Callable[[], None]) -> None:
        """Call ``then`` in some later call of this object, once ``copied`` is reached; ``None``: it is."""
        with self._lock:
            if copied is None:
                then()
            else:
                self._busy.append((copied, then))

    def sweep(self) -> None:
        """Give back what copies no longer read."""
        with self._lock:
            still = []
            for copied, then in self._busy:
                if copied.query():
                    then()
                else:
                    still.append((copied, then))
            self._busy = still

    def wait(self) -> None:
        """Wait for the copies that are under way, and give back what they have read."""
        with self._lock:
            for copied, then in self._busy:
                copied.synchronize()
                then()
            self._busy.clear()


def _rounded(nbytes: int) -> int:
    """Size of a new slot, so that tensors of similar sizes can share it: at most a quarter more."""
    step = max((1 << (nbytes.bit_length() - 1)) // _STEPS_PER_DOUBLING, CONTROL_BYTES)
    return -(-nbytes // step) * step
